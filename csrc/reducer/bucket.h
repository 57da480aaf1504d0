// One bucket: a flat buffer, its views, and the two passes over memory.
//
//   pack    .grad of every parameter -> buffer              (copy + scale + cast; on the CPU when each is whole)
//   unpack  buffer, after the collective -> .grad           (copy + scale + cast)
//
// The buffer has no gaps. Each gradient lies in it in its parameter's memory layout. Autograd's layout contract gives
// `.grad` that layout, too, so most gradients are copied as one piece. Until unpack `.grad` is this rank's own.
// Threads: a bucket has no lock; while a backward may run, the reducer calls it with mutex_ held.
//
// A case may make buckets of another kind (Case::make_bucket): subclasses, in the companions' folders.
#pragma once

#include "copy/scaled_copy.h"
#include "copy/streams.h"
#include "wait.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace minddp {

class Bucket {
 public:
  enum class State { kFilling, kPacked, kLaunched };
  struct Slot {
    size_t index;  // of the parameter
    std::string name;
    at::Tensor parameter;
    int64_t offset;  // in elements
    std::vector<int64_t> strides;
    at::Tensor view;                  // parameter-shaped view on the buffer, of which autograd does not know
    bool packed = false;              // in this iteration
    at::Tensor* elsewhere = nullptr;  // where the gradient is; null: in `.grad`
    at::Tensor& grad() const { return elsewhere ? *elsewhere : parameter.mutable_grad(); }
  };
  struct Options {
    at::ScalarType buffer_dtype;  // what travels; gradients are cast to it and back
    int rank = 0;                 // for messages
    bool any_grad_dtype = false;  // gradients need not have their parameter's dtype
    // Makes the buffer; empty: at::empty.
    std::function<at::Tensor(int64_t numel, const at::TensorOptions& options)> allocate;
  };
  // Parameter-shaped tensors with the numbers in a buffer, in the order of the slots.
  using GradientsIn = std::vector<at::Tensor> (*)(const std::vector<Slot>& slots, const at::Tensor& buffer);
  // How gradients go into the buffer. All but the scale is for the cases.
  struct Packing {
    double scale;
    bool more_may_come;                // further contributions to these gradients may come in this iteration
    const std::vector<int32_t>& used;  // by parameter, on this rank
    const at::Tensor& contribution;    // the one that has just come, if any
  };

  Bucket(const std::vector<size_t>& indices, const std::vector<at::Tensor>& parameters,
      const std::vector<std::string>& names, Options options);
  virtual ~Bucket() = default;

  virtual void begin_iteration();  // back to kFilling, all gradients pending
  // One more gradient is whole (the current stream made it), or is known to be absent. True if it was the last one.
  bool mark_ready() { return producers_.note(), --pending_ == 0; }
  // Copies to the buffer all gradients that are not packed yet, times the scale. A missing gradient counts as zero.
  // The copy runs on the current stream, after the streams that made the gradients. Afterwards kPacked.
  void pack(const Packing& how);
  // On the CPU: packs the gradient of slot i now, while it is in the cache. Later changes of `.grad` are not sent. On
  // a device each copy is a kernel launch, so pack() copies all at once.
  void pack_early(size_t i, const Packing& how) {
    if (device_.is_cpu()) fill(i, i + 1, how);
  }
  // Autograd has added to the gradient of slot i since it was packed. It is marked, so that the next pack copies it
  // again. False if it cannot be packed again. `scale` is for the cases. REQUIRES: not launched.
  virtual bool repack(size_t i, double scale);
  // The current stream (a device's queue of work) waits for the packing, whichever stream ran it.
  virtual void before_launch() { producers_.wait_packed(); }
  void launched(Flight flight) {
    flight_ = std::move(flight);
    state_ = State::kLaunched;
  }
  // Writes `result`, times `scale`, to the gradients of parameters with used[index] != 0, creating those that do not
  // exist. REQUIRES: kLaunched; `result` is as long as the buffer, and lies in memory, one number after another.
  virtual void unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used);
  // Each stream that has made a gradient waits for what the current stream has queued.
  void hold_back_streams() const { producers_.hold_back(); }
  // Forgets the buffer and its collective, which may still be writing to it.
  void abandon();
  virtual void release();  // drops the buffer; the next pack makes a new one
  // From now on gradients are at these places, by parameter; null: in `.grad`.
  virtual void move_gradients(std::vector<at::Tensor>* places) {
    for (Slot& slot : *slots_) slot.elsewhere = places ? &(*places)[slot.index] : nullptr;
  }
  virtual at::Tensor zeros() const;  // what a rank without data sends
  // A function, since who holds a buffer may outlive the bucket.
  virtual GradientsIn gradients_in() const { return &views_in; }
  // Whether the buffer would hold just the gradients, once more: then a single rank needs no buffer.
  virtual bool is_plain() const { return !options_.any_grad_dtype && options_.buffer_dtype == grad_dtype_; }

  State state() const { return state_; }
  bool complete() const { return pending_ == 0; }
  int64_t numel() const { return numel_; }  // of the buffer
  int64_t nbytes() const { return numel_ * int64_t(at::elementSize(options_.buffer_dtype)); }
  at::ScalarType dtype() const { return options_.buffer_dtype; }
  at::Device device() const { return device_; }
  const std::shared_ptr<std::vector<Slot>>& slots() const { return slots_; }
  const at::Tensor& buffer() const { return buffer_; }  // undefined before the first pack, and when released
  const Flight& flight() const { return flight_; }

 protected:
  // Slots begin to end - 1.
  virtual void fill(size_t begin, size_t end, const Packing& how) { copy_in(begin, end, how.scale); }
  virtual at::Tensor new_gradient(const Slot& slot) const;
  // abandon() is about to drop a collective that still runs.
  virtual void leave_to_collective() {}
  void allocate();
  void copy_in(size_t begin, size_t end, double scale);
  void copy_out(const at::Tensor& result, double scale, const std::vector<int32_t>& used);
  at::TensorOptions buffer_options() const {
    return slots_->front().parameter.options().dtype(options_.buffer_dtype).requires_grad(false);
  }
  // Raises where a gradient is of another kind than the bucket's.
  void check(const Slot& slot, const at::Tensor& grad, at::Layout layout) const;
  // Raises where numbers of a gradient are nowhere.
  void check_memory(const Slot& slot, const at::Tensor& numbers) const;
  // Whether a gradient is one piece, or torch's operators must copy it. Raises where it is of another kind than the
  // bucket's, or has no memory.
  bool is_ready_to_copy(const Slot& slot, const at::Tensor& grad) const;
  // The same of the gradient that a result is written to. One that does not exist, or cannot take it, is made anew.
  bool is_ready_to_write(Slot& slot);
  // Whether a gradient's memory is one piece in the order of its parameter's strides, to be copied as it lies.
  static bool is_one_piece(const Slot& slot, const at::Tensor& grad);
  static std::vector<at::Tensor> views_in(const std::vector<Slot>& slots, const at::Tensor& buffer);

  const Options options_;
  const at::ScalarType grad_dtype_;
  const at::Device device_;
  const std::shared_ptr<std::vector<Slot>> slots_ = std::make_shared<std::vector<Slot>>();  // shared with GradBuckets
  int64_t numel_ = 0;
  at::Tensor buffer_;
  State state_ = State::kFilling;
  Producers producers_;  // streams that made this iteration's gradients
  // Held until unpack. Other threads or the device may write to the buffer until then, or to the tensor that a
  // communication hook sends in its place. The flight keeps that memory alive.
  Flight flight_;

 private:
  bool can_cast(at::ScalarType dtype) const {
    return dtype == grad_dtype_ || (at::isFloatingType(dtype) && at::isFloatingType(options_.buffer_dtype));
  }

  size_t pending_ = 0;
  std::vector<CopySegment> segments_;  // reserved once, so that gathering them allocates nothing
};

// set_ instead of as_strided: no autograd view, so users may detach_() gradients.
inline at::Tensor view_of(const at::Tensor& buffer, const Bucket::Slot& slot) {
  const int64_t begin = buffer.storage_offset() + slot.offset;
  return at::empty({0}, buffer.options()).set_(buffer.storage(), begin, slot.parameter.sizes(), slot.strides);
}

}  // namespace minddp
