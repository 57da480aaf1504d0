// Case: one parameter whose gradient is sparse (nn.Embedding(sparse=True)) and travels as it is.
//
// Ranks have different rows, so the sum is a tensor of its own, and becomes the gradient.
#pragma once

#include "reducer/bucket.h"

namespace minddp {

class SparseBucket : public Bucket {
 public:
  using Bucket::Bucket;
  void unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) override;
  bool repack(size_t i, double scale) override;
  at::Tensor zeros() const override;

 protected:
  void fill(size_t begin, size_t end, const Packing& how) override;
};

}  // namespace minddp
