// Case: the module has parameters that are not the reducer's, or not as they were when it was made: added, unfrozen,
// cast or moved since. Python tells of them after a forward (minddp/guards/module_changes.py).
//
// Their gradients would stay local. A synchronized backward that brings one is refused: before anything is sent, if
// its graph tells; else when the gradient comes. A backward that brings none goes on, as does a forward that has
// none.
#pragma once

#include "reducer/grad_hooks.h"
#include "reducer/state.h"

#include <memory>
#include <string>
#include <vector>

namespace minddp {

class ChangedModule : public Case {
 public:
  explicit ChangedModule(const ReducerState& state) : state_(state) {}

  // In place of what was noted before. `why`: the error. `on_gradient` is called for each gradient of these: it lets
  // the reducer see the backward, and then calls on_gradient().
  void note(std::vector<at::Tensor> parameters, std::string why, OnReady on_gradient) {
    hooks_.reset();
    parameters_ = std::move(parameters);
    why_ = std::move(why);
    if (!parameters_.empty()) hooks_ = std::make_unique<GradHooks>(parameters_, std::move(on_gradient), nullptr);
  }

  void on_backward(Forwards::Answer& answer) override {
    if (!hooks_ || answer.origin != Origin::kSynchronized) return;
    const std::vector<char> part = hooks_->taking_part();
    for (size_t i = 0; i < part.size(); ++i)
      if (part[i] > 0) refuse(i);
  }
  // A gradient that the graph has not told of: inside of a reentrant checkpoint, or in another thread's backward.
  void on_gradient(size_t index) const {
    if (state_.backward.is_synchronized()) refuse(index);
  }

 private:
  // Autograd adds nothing to a parameter that was frozen after its graph was made.
  void refuse(size_t index) const {
    if (parameters_[index].requires_grad()) state_.fail(why_);
  }

  const ReducerState& state_;
  std::vector<at::Tensor> parameters_;
  std::string why_;
  std::unique_ptr<GradHooks> hooks_;
};

}  // namespace minddp
