// Case: the reduction is no mean, and a gradient still holds the result of an earlier one.
//
// A mean of equal numbers is that number, so a mean may be taken of whole gradients, with earlier means in them. A
// sum would count the earlier one once a rank: whoever has not called zero_grad() is refused.
#pragma once

#include "errors.h"
#include "reducer/events.h"
#include "reducer/graph_task.h"
#include "reducer/seen_gradient.h"

#include <algorithm>
#include <vector>

namespace minddp {

class EarlierSums : public Case {
 public:
  bool needs_before_accumulation() const override { return true; }
  // In a backward of distributed autograd `.grad` does not change.
  void before_accumulation(size_t index) override {
    if (GraphTaskNodes().are_collected()) refuse(index);
  }
  void on(Moment moment) override {
    if (moment == Moment::kNewBuckets) results_.resize(state().parameters.size());
    if (moment != Moment::kIterationBegin) return;
    for (size_t i = 0; i < results_.size(); ++i) refuse(i);  // a gradient without a contribution is sent, too
    // From now on the same memory holds this iteration's: a gradient that is packed becomes a view of its bucket.
    std::fill(results_.begin(), results_.end(), SeenGradient());
  }
  void averages_written(const Bucket& bucket, const std::vector<int32_t>& used) override {
    for (const Bucket::Slot& slot : *bucket.slots())
      if (const at::Tensor& grad = slot.parameter.grad(); used[slot.index] && grad.defined())
        results_[slot.index] = grad;
  }
  void take_over(const Case& before, const std::vector<int64_t>& there, bool same_group) override {
    const auto* older = dynamic_cast<const EarlierSums*>(&before);
    for (size_t i = 0; older && same_group && i < there.size(); ++i)
      if (there[i] >= 0) results_[i] = older->results_[there[i]];
  }

 private:
  // Neither replaced since nor zeroed. Asking costs a pass over memory for a gradient that was zeroed in place, once:
  // one answer is for all gradients. One that is not zero, and that nobody has asked about, may be zeroed before it
  // grows; it is asked about again.
  void refuse(size_t index) {
    const auto may_hold = [&](size_t i) { return results_[i].is(state().parameters[i].grad()); };
    if (!may_hold(index)) return;
    std::vector<size_t> asked;
    for (size_t i = 0; i < results_.size(); ++i)
      if (may_hold(i)) asked.push_back(i);
    const std::vector<char> holds = with_values(state().parameters, asked);
    for (size_t i : asked)
      if (!holds[i]) results_[i] = SeenGradient();
    if (holds[index]) state().fail(errors::summed_again(state().rank, state().names[index]));
  }

  std::vector<SeenGradient> results_;  // by parameter: the `.grad` that holds the last sum
};

}  // namespace minddp
