// Case: one parameter whose gradient is sparse (nn.Embedding(sparse=True)) and travels as it is.
//
// Ranks have different rows, so the sum is a tensor of its own, and becomes the gradient.
#pragma once

#include "reducer/events.h"

#include <vector>

namespace minddp {

class SparseBucket : public Bucket {
 public:
  using Bucket::Bucket;
  bool is_plain() const override { return false; }
  void unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) override;
  bool repack(size_t i, double scale) override;
  at::Tensor zeros() const override;

 protected:
  void fill(size_t begin, size_t end, const Packing& how) override;
};

class SparseBuckets : public Case {
 public:
  explicit SparseBuckets(std::vector<bool> expect_sparse) : expect_sparse_(std::move(expect_sparse)) {}
  std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>& indices, Bucket::Options& options) override;
  std::optional<Flight> all_reduce(Bucket& bucket, const at::Tensor& buffer, const Wait& wait) override;

 private:
  const std::vector<bool> expect_sparse_;  // by parameter
};

}  // namespace minddp
