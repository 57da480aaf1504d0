// Whether a gradient's memory is one piece in the order of its parameter's strides, to be copied as it lies.
//
// Strides of dimensions of size 1 say nothing: convolutions in channels_last leave them arbitrary. Pure.
#pragma once

#include <ATen/core/Tensor.h>

namespace minddp {

inline bool is_one_piece(const at::Tensor& grad, at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (grad.sizes() != sizes || grad.is_conj() || grad.is_neg()) return false;
  if (grad.key_set().has(c10::DispatchKey::Python)) return false;  // a subclass: its memory is its own affair
  for (int64_t d = 0; d < grad.dim(); ++d)
    if (grad.size(d) != 1 && grad.stride(d) != strides[d]) return false;
  return true;
}

}  // namespace minddp
