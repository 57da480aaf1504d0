#include "earlier_sums.h"

#include "support/errors.h"

#include <ATen/ATen.h>

#include <vector>

namespace minddp {

bool EarlierSums::may_hold(size_t index) const {
  return state_.grads[index].result == state_.parameters[index].grad();
}

// Neither replaced since nor zeroed. Asking costs a pass over memory for a gradient that was zeroed in place, once,
// and on a device the host waits for the answer: so one answer is for all gradients there. A gradient that is not
// zero, and that nobody has asked about, may be zeroed before it grows; it is asked about again.
void EarlierSums::refuse(size_t index) {
  if (!may_hold(index)) return;
  const at::Device device = state_.parameters[index].device();
  std::vector<size_t> asked;
  std::vector<at::Tensor> nonzero;
  for (size_t i = 0; i < state_.parameters.size(); ++i) {
    const at::Tensor& grad = state_.parameters[i].grad();
    if (state_.parameters[i].device() != device || !may_hold(i)) continue;
    asked.push_back(i);
    nonzero.push_back((grad.is_sparse() ? grad.coalesce().values() : grad).any());
  }
  const at::Tensor answers = at::stack(nonzero).cpu();
  for (size_t k = 0; k < asked.size(); ++k)
    if (!answers[int64_t(k)].item<bool>()) state_.grads[asked[k]].result = SameTensor();
  if (may_hold(index)) state_.fail(errors::summed_again(state_.rank, state_.names[index]));
}

}  // namespace minddp
