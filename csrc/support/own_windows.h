// Windows on a bucket's buffer; and gradient_as_bucket_view, where programs have moved them.
//
// `a.grad, b.grad = b.grad, a.grad` leaves each in the other's place in the buffer. Whichever is packed first would
// be copied over what the other still accumulates into. `a.grad.data = ...`, which module.to(memory_format=...) does,
// gives the window itself other memory. Pure but for `.grad` and the slots' windows: the caller's thread.
#pragma once

#include <ATen/ATen.h>

namespace minddp {

// set_ instead of as_strided: no autograd view, so users may detach_() gradients.
template <class Slot>
at::Tensor window(const at::Tensor& buffer, const Slot& slot) {
  const int64_t begin = buffer.storage_offset() + slot.offset;
  return at::empty({0}, buffer.options()).set_(buffer.storage(), begin, slot.parameter.sizes(), slot.strides);
}

// A window that lies elsewhere now is the program's; the slot gets another one.
// REQUIRES: nothing is packed yet
template <class Buckets>
void renew_windows(Buckets& buckets) {
  for (auto& bucket : buckets) {
    const at::Tensor& buffer = bucket.buffer();
    if (!buffer.defined() || !buffer.has_storage()) continue;
    for (auto& slot : *bucket.slots()) {
      if (!slot.view.defined()) continue;
      const bool at_home = slot.view.is_alias_of(buffer) && slot.view.strides() == at::IntArrayRef(slot.strides) &&
          slot.view.storage_offset() == buffer.storage_offset() + slot.offset;
      if (!at_home) slot.view = window(buffer, slot);
    }
  }
}

// Gives a gradient memory of its own where it begins where another parameter's window does, or lies across its own,
// transposed. Where the window's parameter has the same gradient, the program has made them one, and they stay so.
// REQUIRES: nothing is packed yet
template <class Buckets>
void leave_others_windows(const Buckets& buckets) {
  const auto begin_alike = [](const at::Tensor& a, const at::Tensor& b) {
    return a.defined() && a.has_storage() && a.const_data_ptr() == b.const_data_ptr();
  };
  const auto displaced = [&](const at::Tensor& grad) {
    for (const auto& bucket : buckets) {
      const at::Tensor& buffer = bucket.buffer();
      if (!buffer.defined() || !buffer.has_storage() || !buffer.is_alias_of(grad)) continue;
      for (const auto& slot : *bucket.slots())
        if (begin_alike(slot.view, grad))
          return !begin_alike(slot.parameter.grad(), grad) || slot.view.strides() != grad.strides();
    }
    return false;
  };
  for (const auto& bucket : buckets) {
    for (const auto& slot : *bucket.slots()) {
      at::Tensor& grad = slot.parameter.mutable_grad();
      if (grad.defined() && !grad.is_same(slot.view) && grad.has_storage() && displaced(grad)) grad = grad.clone();
    }
  }
}

// At the start of an iteration: each slot has its window, and no gradient lies in another's.
// REQUIRES: nothing is packed yet
template <class Buckets>
void own_windows(Buckets& buckets) {
  renew_windows(buckets);
  leave_others_windows(buckets);
}

}  // namespace minddp
