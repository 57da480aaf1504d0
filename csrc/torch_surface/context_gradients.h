// Case: gradients that do not go to `.grad`. A backward of distributed autograd (torch.distributed.autograd.backward,
// RPC) puts them into its context, a map from parameter to gradient that each worker keeps for it.
//
// For the iteration of such a backward each gradient has a place here, filled from the context as gradients come, and
// brought back to it at the end: `.grad` is not touched, and what is known of it waits. A context may destroy a graph
// with its own lock held, and call back from there: nothing that happens then may ask the context.
#pragma once

#include "reducer/events.h"

#include <memory>
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
  explicit ContextGradients(std::string refusal) : refusal_(std::move(refusal)) {}
  void on(Moment moment) override;
  bool follows_gradients() const override { return true; }
  void on_gradient(ArrivedGradient& gradient) override;

 private:
  const char* fetch(const ArrivedGradient& gradient, bool begun);
  void enter();
  void bring_back();
  void leave();

  const std::string refusal_;
#ifdef MINDDP_WITH_RPC
  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
#else
  std::shared_ptr<void> context_;
#endif
  std::vector<at::Tensor> places_;
  std::vector<int32_t> used_;  // ReducerState::used, of `.grad`, meanwhile
};

}  // namespace minddp
