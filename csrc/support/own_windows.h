// gradient_as_bucket_view: a gradient that the program has moved into another parameter's window.
//
// `a.grad, b.grad = b.grad, a.grad` leaves each in the other's place in the buffer. Whichever is packed first would
// be copied over what the other still accumulates into. Pure but for `.grad`: the caller's thread.
#pragma once

#include <ATen/core/Tensor.h>

namespace minddp {

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

}  // namespace minddp
