#include "earlier_sums.h"

#include "support/errors.h"

#include <ATen/ATen.h>

namespace minddp {

// Neither replaced since nor zeroed. Asking costs a pass over memory for a gradient that was zeroed in place, once.
void EarlierSums::refuse(size_t index) {
  const at::Tensor& grad = state_.parameters[index].grad();
  if (!(state_.grads[index].result == grad)) return;
  const at::Tensor values = grad.is_sparse() ? grad.coalesce().values() : grad;
  if (values.any().item<bool>()) state_.fail(errors::summed_again(state_.rank, state_.names[index]));
  state_.grads[index].result = SameTensor();
}

}  // namespace minddp
