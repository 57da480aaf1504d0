// Case: a communication hook (register_comm_hook).
//
// Without one the reducer all-reduces the buffer. A hook takes its place: it gets a GradBucket and returns a
// future of one tensor, the reduced bucket. GradBucket offers what torch's does.
#pragma once

#include "quantized_bucket.h"
#include "reducer/state.h"

#include <ATen/ATen.h>

namespace minddp {

// What a hook sees of a bucket; a value, which may outlive the backward that made it. As with torch's class, the
// buffer of complex gradients holds pairs of real numbers: hooks cast, clamp and compare.
class GradBucket {
 public:
  GradBucket(const ReducerState& state, size_t index, at::Tensor buffer)
      : index_(index), is_last_(index + 1 == state.buckets.size()), is_complex_(buffer.is_complex()),
        buffer_(is_complex_ ? at::view_as_real(buffer).flatten() : std::move(buffer)),
        slots_(state.buckets[index]->slots()) {}
  size_t index() const { return index_; }
  bool is_last() const { return is_last_; }
  const at::Tensor& buffer() const { return buffer_; }
  void set_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }
  std::vector<at::Tensor> gradients() const {  // parameter-shaped views on buffer()
    if (buffer_.is_sparse()) return {buffer_};
    if (buffer_.scalar_type() == at::kByte) return dequantized(*slots_, buffer_);  // copies
    std::vector<at::Tensor> tensors;
    const at::Tensor all = is_complex_ ? at::view_as_complex(buffer_.view({-1, 2})) : buffer_;
    for (const Bucket::Slot& s : *slots_)
      tensors.push_back(all.as_strided(s.parameter.sizes(), s.strides, all.storage_offset() + s.offset));
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
  bool is_last_, is_complex_;
  at::Tensor buffer_;
  std::shared_ptr<const std::vector<Bucket::Slot>> slots_;
};

// A hook that gets a GradBucket.
class GradBucketHook : public CommHook {
 public:
  explicit GradBucketHook(const ReducerState& state) : state_(state) {}
  Flight start(size_t bucket, at::Tensor buffer) override {
    GradBucket seen(state_, bucket, std::move(buffer));
    auto future = run(seen);  // may set `work`
    return {std::move(future), std::exchange(work, nullptr)};
  }

 protected:
  virtual c10::intrusive_ptr<Future> run(GradBucket& bucket) = 0;

 private:
  const ReducerState& state_;
};

}  // namespace minddp
