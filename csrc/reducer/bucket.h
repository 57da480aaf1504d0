// One bucket: a flat buffer, its windows, and the two passes over memory.
//
//   pack    .grad of every parameter -> buffer              (copy + scale + cast; on the CPU as each arrives)
//   unpack  buffer, after the collective -> .grad           (the same, or nothing with views)
//
// The only unit that touches `.grad`, and only when backward is over: until unpack, whoever looks at a gradient sees
// this rank's own. (With gradient_as_view, `.grad` is a window on the buffer from pack on, and shows what is there.)
//
// Always: the buffer holds the gradients one after another without gaps, each in its parameter's own memory layout,
// so that a gradient that keeps autograd's layout contract is one contiguous piece on both sides. Threads: the
// reducer's; a bucket has no lock.
#pragma once

#include "support/context_gradients.h"
#include "support/exchange_memory.h"
#include "support/one_piece.h"
#include "support/scaled_copy.h"
#include "support/sole_holder.h"
#include "wait.h"

#include "cuda/producers.h"
#include "transport/memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

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
    at::Tensor view;      // parameter-shaped window on the buffer (not a view to autograd)
    bool packed = false;  // in this backward
    double left = 1.0;    // what it is to be multiplied with before its bucket leaves
    at::Tensor* place = nullptr;
    // Where its gradient is, and its average goes: `.grad`, but in a backward of distributed autograd's.
    at::Tensor& grad() const { return place ? *place : parameter.mutable_grad(); }
  };
  struct Options {
    at::ScalarType buffer_dtype;    // what travels; gradients are cast to it and back
    bool sparse = false;            // one parameter, whose gradient travels as it is
    bool gradient_as_view = false;  // .grad becomes a window on the buffer
    bool any_grad_dtype = false;    // gradients need not have their parameter's dtype
    int rank = 0;                   // for messages
    Allocate allocate = nullptr;    // makes the buffer; empty: at::empty
  };
  Bucket(const std::vector<size_t>& indices, const std::vector<at::Tensor>& parameters,
      const std::vector<std::string>& names, Options options);

  void begin_backward() {  // back to kFilling, all gradients pending
    state_ = State::kFilling;
    pending_ = slots_->size();
    producers_.clear();
    for (Slot& slot : *slots_) slot.packed = false;
    if (borrowed_) release();
  }
  // A gradient, made on the current stream, is whole; true when it was the last one.
  bool mark_ready() { return producers_.note(), --pending_ == 0; }
  // Copies the gradients that are not there yet, times `scale`, into the buffer, on the current stream, after the
  // streams that made them; a missing gradient counts as zero. Afterwards kPacked. With views, a gradient alone in
  // its bucket is not copied where nobody else holds its memory: that memory is the buffer. `may_grow`: contributions
  // may follow; where one will be added to the buffer itself, the scale is applied before_launch().
  void pack(double scale, const std::vector<int32_t>& used, const at::Tensor& contribution, bool may_grow);
  // The same for gradient i of several, just made: what is done to `.grad` from here on changes nothing, it is still
  // in the CPU's cache and, where it becomes a view, its own memory is free for the next. On a device, where every
  // copy is a launch, all are copied when the last one is there.
  void pack_early(size_t i, double scale, bool may_grow);
  // Gradient i has grown since; false when what was packed has left, or was scaled where the growth went.
  bool repack(size_t i, double scale);
  // With views: gradients that are there before any backward become windows, as they are.
  void adopt_gradients();
  void launched(Flight flight) {
    flight_ = std::move(flight);
    state_ = State::kLaunched;
  }
  // What the current stream launches comes after the packing, on whichever stream that was, and after what this has
  // left to do. REQUIRES: kPacked.
  void before_launch();
  // The streams that made this backward's gradients go on after its end, on the current stream.
  void hold_back_streams() const { producers_.hold_back(); }
  // Forgets buffer and collective, which nobody waits for any more. It may still write to the buffer, and keeps that
  // alive: a `.grad` that is a window on it becomes a tensor of its own.
  void abandon();
  // Writes `result`, times `scale`, to the gradients of parameters with used[index] != 0, creating those that do not
  // exist. A gradient alone in its bucket, whose memory nobody else holds, changes memory with the buffer instead: a
  // pass less. REQUIRES: kLaunched.
  void unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used);
  void release() {  // drops the buffer; the next pack makes a new one
    buffer_ = at::Tensor();
    borrowed_ = false;
    for (Slot& slot : *slots_) slot.view = at::Tensor();
  }

  // Gradients are in other places from now on. Windows that were made so far keep their memory to themselves.
  void move_to(ContextGradients& gradients) {
    if (options_.gradient_as_view) release();
    for (Slot& slot : *slots_) slot.place = gradients.in_use() ? &gradients.place(slot.index) : nullptr;
  }

  State state() const { return state_; }
  bool complete() const { return pending_ == 0; }
  int64_t numel() const { return numel_; }
  int64_t nbytes() const { return numel_ * int64_t(at::elementSize(options_.buffer_dtype)); }
  const Options& options() const { return options_; }
  at::Device device() const { return device_; }
  const std::shared_ptr<std::vector<Slot>>& slots() const { return slots_; }
  const at::Tensor& buffer() const { return buffer_; }  // undefined when released
  at::Tensor zeros() const;                             // what a rank without data sends
  const Flight& flight() const { return flight_; }

 private:
  void allocate();
  void pack_dense(size_t begin, size_t end, double scale, bool may_grow);  // slots
  bool can_borrow(const std::vector<int32_t>& used, const at::Tensor& contribution) const;
  void borrow(double scale, bool may_grow);
  void pack_sparse(double scale);
  void unpack_sparse(const at::Tensor& result, double scale);
  bool exchange(const at::Tensor& result, double scale);
  void adopt_view(Slot& slot);
  static bool is_one_piece(const Slot& slot, const at::Tensor& grad) {
    return minddp::is_one_piece(grad, slot.parameter.sizes(), slot.strides);
  }
  bool can_cast(at::ScalarType dtype) const {
    return dtype == grad_dtype_ || (at::isFloatingType(dtype) && at::isFloatingType(options_.buffer_dtype));
  }
  void check(Slot& slot, const at::Tensor& grad) const;

  const Options options_;
  const at::ScalarType grad_dtype_;
  const at::Device device_;
  const std::shared_ptr<std::vector<Slot>> slots_ = std::make_shared<std::vector<Slot>>();  // shared with hooks
  int64_t numel_ = 0;
  at::Tensor buffer_;
  bool borrowed_ = false;  // buffer_ is the gradient's own memory
  size_t pending_ = 0;
  State state_ = State::kFilling;
  Producers producers_;                // streams that made this backward's gradients
  std::vector<CopySegment> segments_;  // reserved once: packing allocates nothing
  // Held until unpack: it keeps the buffer, and what a hook put in its place, alive while other threads or the device
  // still write to it.
  Flight flight_;
};

}  // namespace minddp
