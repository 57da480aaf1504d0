// Whether a gradient's memory is known to nobody but the gradient itself.
//
// Gradients may share memory: that of torch.cat's inputs are views on one tensor, and a hook may have kept one.
// What changes such memory before the end of backward changes what others still read. Pure.
#pragma once

#include <ATen/core/Tensor.h>

namespace minddp {

// `contribution`: what autograd has just added to `grad`, while its hooks run; else undefined. A first contribution
// becomes `.grad` itself; autograd's reference to it, and to what it is a view of, end with the hook.
inline bool is_sole_holder(const at::Tensor& grad, const at::Tensor& contribution) {
  size_t others = grad.storage().use_count() - 1;
  if (contribution.defined() && contribution.is_alias_of(grad) && contribution.use_count() == 1) {
    others -= 1;
    if (contribution.is_view() && contribution._base().use_count() == 1) others -= 1;
  }
  return others == 0;
}

}  // namespace minddp
