#include "earlier_sums.h"

#include "errors.h"
#include "reducer/graph_task.h"

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

// Neither replaced since nor zeroed. Asking costs a pass over memory for a gradient that was zeroed in place, once:
// one answer is for all gradients. One that is not zero, and that nobody has asked about, may be zeroed before it
// grows; it is asked about again.
void EarlierSums::refuse(size_t index) {
  const auto may_hold = [&](size_t i) { return results_[i].is(state().parameters[i].grad()); };
  if (!may_hold(index)) return;
  std::vector<size_t> asked;
  for (size_t i = 0; i < state().parameters.size(); ++i)
    if (may_hold(i)) asked.push_back(i);
  const std::vector<char> holds = with_values(state().parameters, asked);
  for (size_t i : asked)
    if (!holds[i]) results_[i] = SeenGradient();
  if (holds[index]) state().fail(errors::summed_again(state().rank, state().names[index]));
}

}  // namespace minddp
