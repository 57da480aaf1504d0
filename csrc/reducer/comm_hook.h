// How a packed bucket is reduced over the ranks.
//
// Without a hook the reducer all-reduces the buffer. A hook takes its place: it gets a GradBucket and returns a
// future of one tensor, the reduced bucket. GradBucket offers what torch's does.
#pragma once

#include "bucket.h"

#include <ATen/ATen.h>

namespace minddp {

// What a hook sees of a bucket; a value, which may outlive the backward that made it.
class GradBucket {
 public:
  GradBucket(size_t index, bool is_last, at::Tensor buffer, std::shared_ptr<const std::vector<Bucket::Slot>> slots)
      : index_(index), is_last_(is_last), buffer_(std::move(buffer)), slots_(std::move(slots)) {}
  size_t index() const { return index_; }
  bool is_last() const { return is_last_; }
  const at::Tensor& buffer() const { return buffer_; }
  void set_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }
  std::vector<at::Tensor> gradients() const {  // parameter-shaped views on buffer()
    if (buffer_.is_sparse()) return {buffer_};
    std::vector<at::Tensor> tensors;
    for (const Bucket::Slot& s : *slots_)
      tensors.push_back(buffer_.as_strided(s.parameter.sizes(), s.strides, buffer_.storage_offset() + s.offset));
    return tensors;
  }
  // In the order of gradients().
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> tensors;
    for (const Bucket::Slot& slot : *slots_) tensors.push_back(slot.parameter);
    return tensors;
  }

 private:
  size_t index_;
  bool is_last_;
  at::Tensor buffer_;
  std::shared_ptr<const std::vector<Bucket::Slot>> slots_;
};

class CommHook {
 public:
  virtual ~CommHook() = default;
  // Called once for each bucket that is sent, in launch order, on the thread that launches it.
  virtual c10::intrusive_ptr<Future> run(GradBucket& bucket) = 0;
  // The tensor in a completed future's value.
  virtual at::Tensor result(const c10::IValue& value) = 0;
};

}  // namespace minddp
