// How a packed bucket becomes the ranks' reduced one.
//
// Without a hook the reducer all-reduces the buffer. A hook takes its place: it gets a GradBucket and
// returns a future of one tensor, the reduced bucket. GradBucket offers what
// torch.distributed.GradBucket does, so that hooks written for torch run unchanged.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace minddp {

using Future = c10::ivalue::Future;

// What a hook sees of a bucket. Holds references: valid as long as the tensors are.
class GradBucket {
 public:
  struct Piece {
    at::Tensor parameter;
    int64_t offset;
    std::vector<int64_t> strides;
  };

  GradBucket(size_t index, size_t bucket_count, at::Tensor buffer, std::vector<Piece> pieces)
      : index_(index), bucket_count_(bucket_count), buffer_(std::move(buffer)), pieces_(std::move(pieces)) {}

  size_t index() const { return index_; }
  bool is_last() const { return index_ + 1 == bucket_count_; }
  const at::Tensor& buffer() const { return buffer_; }
  void set_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }
  std::vector<at::Tensor> gradients() const;   // parameter-shaped windows on buffer()
  std::vector<at::Tensor> parameters() const;

 private:
  size_t index_;
  size_t bucket_count_;
  at::Tensor buffer_;
  std::vector<Piece> pieces_;
};

class CommHook {
 public:
  virtual ~CommHook() = default;
  // Called once per bucket, in launch order, on the thread that completed the bucket.
  virtual c10::intrusive_ptr<Future> run(GradBucket& bucket) = 0;
  // The tensor in the future's value. REQUIRES: the future is completed without an error.
  virtual at::Tensor result(const c10::IValue& value) = 0;
};

// The future of `tensor`, all-reduced in place by sum (AVG where `average`), with dtypes that
// backends lack (complex) reduced as what they consist of.
c10::intrusive_ptr<Future> allreduce(c10d::ProcessGroup& group, const at::Tensor& tensor, bool average);

}  // namespace minddp
