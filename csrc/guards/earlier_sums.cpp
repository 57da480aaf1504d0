#include "earlier_sums.h"

#include "errors.h"
#include "reducer/graph_task.h"

#include <ATen/ATen.h>

namespace minddp {

// In a backward of distributed autograd `.grad` does not change.
void EarlierSums::before_accumulation(size_t index) {
  if (GraphTaskNodes().are_collected()) refuse(index);
}

void EarlierSums::on(Moment moment) {
  if (moment == Moment::kNewBuckets) results_.resize(state().parameters.size());
  if (moment != Moment::kIterationBegin) return;
  for (size_t i = 0; i < state().parameters.size(); ++i) refuse(i);  // a gradient without a contribution is sent, too
}

void EarlierSums::averages_written(const Bucket& bucket, const std::vector<int32_t>& used) {
  for (const Bucket::Slot& slot : *bucket.slots())
    if (const at::Tensor& grad = slot.parameter.grad(); used[slot.index] && grad.defined())
      results_[slot.index] = grad;
}

void EarlierSums::take_over(const Case& before, const std::vector<int64_t>& there, bool same_group) {
  const auto* older = dynamic_cast<const EarlierSums*>(&before);
  for (size_t i = 0; older && same_group && i < there.size(); ++i)
    if (there[i] >= 0) results_[i] = older->results_[there[i]];
}

bool EarlierSums::may_hold(size_t index) const { return results_[index] == state().parameters[index].grad(); }

// Neither replaced since nor zeroed. Asking costs a pass over memory for a gradient that was zeroed in place, once,
// and on a device the host waits for the answer: so one answer is for all gradients there. A gradient that is not
// zero, and that nobody has asked about, may be zeroed before it grows; it is asked about again.
void EarlierSums::refuse(size_t index) {
  if (!may_hold(index)) return;
  const at::Device device = state().parameters[index].device();
  std::vector<size_t> asked;
  std::vector<at::Tensor> nonzero;
  for (size_t i = 0; i < state().parameters.size(); ++i) {
    const at::Tensor& grad = state().parameters[i].grad();
    if (state().parameters[i].device() != device || !may_hold(i)) continue;
    asked.push_back(i);
    nonzero.push_back((grad.is_sparse() ? grad.coalesce().values() : grad).any());
  }
  const at::Tensor answers = at::stack(nonzero).cpu();
  for (size_t k = 0; k < asked.size(); ++k)
    if (!answers[int64_t(k)].item<bool>()) results_[asked[k]] = SameTensor();
  if (may_hold(index)) state().fail(errors::summed_again(state().rank, state().names[index]));
}

}  // namespace minddp
