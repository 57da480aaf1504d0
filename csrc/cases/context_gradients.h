// Case: gradients that do not go to `.grad`. A backward of distributed autograd (torch.distributed.autograd.backward,
// RPC) puts them into its context, a map from parameter to gradient that each worker keeps for it.
//
// For the iteration of such a backward each gradient has a place here, filled from the context as gradients come, and
// brought back to it at the end: `.grad` is not touched, and what is known of it waits. A context may destroy a graph
// with its own lock held, and call back from there: nothing that happens then may ask the context.
#pragma once

#include "reducer/state.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

#ifdef MINDDP_WITH_RPC
namespace torch::distributed::autograd {
class DistAutogradContext;
}
#endif

namespace minddp {

class ContextGradients : public Case {
 public:
  // `refusal`: why no context's gradients can be reduced; empty: they can.
  ContextGradients(ReducerState& state, std::string refusal) : state_(state), refusal_(std::move(refusal)) {}
  void on_arrival(ArrivedGradient& arrival) override;
  void on_end(bool done) override;

  // Whether the backward that runs on this thread is one of distributed autograd's.
  static bool has_current();

 private:
  const char* fetch(const ArrivedGradient& arrival, bool begun);
  void enter();
  void bring_back();

  ReducerState& state_;
  const std::string refusal_;
#ifdef MINDDP_WITH_RPC
  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
#else
  std::shared_ptr<void> context_;
#endif
  std::vector<at::Tensor> places_;
  std::optional<GradStates> of_grad_;  // what is known of `.grad`, meanwhile
};

}  // namespace minddp
