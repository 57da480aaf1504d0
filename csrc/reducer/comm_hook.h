// A communication hook (register_comm_hook).
//
// Without one the reducer all-reduces the buffer. A hook takes its place: it gets a GradBucket and returns a
// future of one tensor, the reduced bucket. GradBucket offers what torch's does.
#pragma once

#include "events.h"

#include <ATen/ATen.h>

namespace minddp {

// What a hook sees of a bucket; a value, which may outlive the backward that made it. As with torch's class, the
// buffer of complex gradients holds pairs of real numbers: hooks cast, clamp and compare.
class GradBucket {
 public:
  GradBucket(const ReducerState& state, size_t index, at::Tensor buffer)
      : index_(index), is_last_(index + 1 == state.buckets.size()), is_complex_(buffer.is_complex()),
        buffer_(is_complex_ ? at::view_as_real(buffer).flatten() : std::move(buffer)),
        slots_(state.buckets[index]->slots()), gradients_in_(state.buckets[index]->gradients_in()) {}
  size_t index() const { return index_; }
  bool is_last() const { return is_last_; }
  const at::Tensor& buffer() const { return buffer_; }
  void set_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }
  std::vector<at::Tensor> gradients() const {  // parameter-shaped; views on buffer(), unless it holds codes
    if (buffer_.is_sparse()) return {buffer_};
    return gradients_in_(*slots_, is_complex_ ? at::view_as_complex(buffer_.view({-1, 2})) : buffer_);
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
  Bucket::GradientsIn gradients_in_;
};

// Stands in the place of the reducer's all-reduce.
class CommHook {
 public:
  explicit CommHook(const ReducerState& state) : state_(state) {}
  virtual ~CommHook() = default;
  // Starts the reduction of a packed bucket. Called once for each that is sent, in launch order, on the thread that
  // launches it.
  Flight start(size_t bucket, at::Tensor buffer) {
    GradBucket seen(state_, bucket, std::move(buffer));
    auto future = run(seen);  // may set `work`
    return {std::move(future), std::exchange(work, nullptr)};
  }
  // The reduced bucket: the tensor in the completed future's value.
  virtual at::Tensor result(const c10::IValue& value) = 0;
  // Devices only: Reducer::all_reduce() sets it if the hook calls that.
  c10::intrusive_ptr<c10d::Work> work;

 protected:
  virtual c10::intrusive_ptr<Future> run(GradBucket& bucket) = 0;

 private:
  const ReducerState& state_;
};

}  // namespace minddp
