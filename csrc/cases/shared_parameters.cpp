#include "shared_parameters.h"

#include "support/errors.h"
#include "support/same_tensor.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace minddp {

void SharedParameters::add(const std::shared_ptr<const ReducerState>& other, bool views) {
  std::erase_if(owners_, [&](const Owner& o) { return o.state.expired() || o.state.lock() == other; });
  owners_.push_back({other, indices_in(other->parameters, state_.parameters), views});
}

// Torch adopts another wrapper's backward as well; here the forward stops waiting.
void SharedParameters::on_backward(Forwards::Answer& answer) {
  if (!answer.adopted) return;
  const bool of_another = std::ranges::any_of(owners_, [](const Owner& owner) {
    const auto other = owner.state.lock();
    return other && other->forwards.has_nodes_in_graph();
  });
  if (!of_another) return;
  answer = {Origin::kBypassed};
  state_.forwards.stop_waiting();
}

// The second wrapper would send what the first is writing to.
void SharedParameters::on_arrival(ArrivedGradient& arrival) {
  if (alone_ || !state_.backward.is_synchronized()) return;
  const bool shared = std::ranges::any_of(owners_, [&](const Owner& owner) {
    const auto other = owner.views && owner.indices[arrival.index] >= 0 ? owner.state.lock() : nullptr;
    return other && other->backward.is_synchronized() &&
        other->grads.arrived_in(owner.indices[arrival.index]) == torch::autograd::get_current_graph_task_id();
  });
  if (shared) state_.fail(errors::shared_view(state_.rank, {arrival.index, state_.names[arrival.index]}));
}

}  // namespace minddp
