#include "shared_parameters.h"

#include "errors.h"
#include "reducer/graph_task.h"

#include <algorithm>

namespace minddp {

void SharedParameters::add(const std::shared_ptr<const ReducerState>& other, bool views) {
  std::erase_if(owners_, [&](const Owner& o) { return o.state.expired() || o.state.lock() == other; });
  owners_.push_back({other, indices_in(other->parameters, state().parameters), views});
}

// Torch adopts another wrapper's backward as well; here the forward stops waiting.
void SharedParameters::on_origin(Forwards::Answer& answer) {
  if (!answer.adopted) return;
  const bool of_another = std::ranges::any_of(owners_, [](const Owner& owner) {
    const auto other = owner.state.lock();
    return other && other->forwards.has_nodes_in_graph();
  });
  if (!of_another) return;
  answer = {Origin::kBypassed};
  state().forwards.stop_waiting();
}

// The second wrapper would send what the first is writing to.
void SharedParameters::on_gradient(ArrivedGradient& gradient) {
  if (state().is_alone() || !state().backward.is_synchronized()) return;
  const bool shared = std::ranges::any_of(owners_, [&](const Owner& owner) {
    const auto other = owner.views && owner.indices[gradient.index] >= 0 ? owner.state.lock() : nullptr;
    return other && other->backward.is_synchronized() &&
        other->arrived_in[owner.indices[gradient.index]] == current_graph_task();
  });
  if (shared) state().fail(errors::shared_view(state().rank, state().names[gradient.index]));
}

}  // namespace minddp
