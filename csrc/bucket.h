// One bucket: a flat buffer, its windows, and the two passes over memory.
//
//   pack    .grad of every parameter -> buffer   (copy + scale + cast)
//   unpack  buffer, after the collective -> .grad (copy + scale + cast, or nothing with views)
//
// This is the only unit that touches `.grad`. Always: the buffer holds the parameters' gradients one
// after another without gaps, each in its parameter's own memory layout, so that a gradient that
// keeps autograd's layout contract is one contiguous piece on both sides.
//
// Threads: the reducer's (see reducer.h); a bucket has no lock of its own.
#pragma once

#include "scaled_copy.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

namespace minddp {

class Bucket {
 public:
  enum class State { kFilling, kPacked, kLaunched };

  struct Slot {
    size_t index;          // of the parameter
    at::Tensor parameter;
    std::string name;
    int64_t offset;        // in elements
    int64_t numel;
    std::vector<int64_t> strides;
    at::Tensor view;       // parameter-shaped window on the buffer (not a view to autograd)
  };

  struct Options {
    at::ScalarType buffer_dtype;    // what travels; gradients are cast to it and back
    bool sparse = false;            // one parameter whose gradient travels as it is
    bool gradient_as_view = false;  // .grad becomes a window on the buffer
    int rank = 0;                   // for messages
  };

  Bucket(
      const std::vector<size_t>& indices,
      const std::vector<at::Tensor>& parameters,
      const std::vector<std::string>& names,
      Options options);

  // A gradient of this bucket is whole, produced on the current stream.
  // Returns true when it was the last one missing. REQUIRES: state() == kFilling, pending() > 0.
  bool mark_ready();

  // Copies every gradient, times `scale`, into the buffer; a missing gradient counts as zero.
  // Ordered on the current stream after the streams that made the gradients.
  void pack(double scale);

  // Writes `result`, times `scale`, to the gradients of the parameters with used[index] != 0.
  // A parameter without a gradient gets one. REQUIRES: state() == kLaunched.
  void unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used);

  void begin_backward();  // back to kFilling, all gradients pending
  void repack() { state_ = State::kFilling; }  // a gradient grew after pack, before launch
  void launched(c10::intrusive_ptr<c10::ivalue::Future> future);
  void release();  // drops the buffer; the next pack makes a new one

  State state() const { return state_; }
  size_t pending() const { return pending_; }
  int64_t nbytes() const { return numel_ * static_cast<int64_t>(at::elementSize(options_.buffer_dtype)); }
  int64_t numel() const { return numel_; }
  bool sparse() const { return options_.sparse; }
  bool allocated() const { return buffer_.defined(); }
  at::Device device() const { return slots_[0].parameter.device(); }
  const std::vector<Slot>& slots() const { return slots_; }
  const at::Tensor& buffer() const { return buffer_; }
  const c10::intrusive_ptr<c10::ivalue::Future>& future() const { return future_; }
  at::Tensor zeros_like_buffer() const;

 private:
  void allocate();
  void wait_for_producers();
  void pack_dense(double scale);
  void pack_sparse(double scale);
  bool contiguous_piece(const Slot& slot, const at::Tensor& grad) const;
  void check_gradient(const Slot& slot, const at::Tensor& grad) const;

  const Options options_;
  const at::ScalarType grad_dtype_;
  std::vector<Slot> slots_;
  int64_t numel_ = 0;
  at::Tensor buffer_;
  size_t pending_ = 0;
  State state_ = State::kFilling;
  std::vector<c10::Stream> producers_;    // streams that made this backward's gradients
  std::vector<CopySegment> segments_;     // reserved once: packing allocates nothing
  // The collective in flight. Held until unpack: it keeps the buffer, and whatever a hook put in
  // its place, alive while other threads or the device still write to it.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace minddp
