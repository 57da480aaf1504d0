// Case: the module has parameters that are not the reducer's, or not as they were when it was made: added, unfrozen,
// cast or moved since. Python tells of them after a forward (minddp/guards/module_changes.py).
//
// Their gradients would stay local. A synchronized backward that brings one is refused: before anything is sent, if
// its graph shows it; otherwise when the gradient comes. A backward that brings none goes on, as does a forward that
// has none.
#pragma once

#include "reducer/reducer.h"

#include <memory>
#include <string>
#include <vector>

namespace minddp {

class ChangedModule : public Case {
 public:
  // Replaces what was noted before. `why`: the error's text.
  void note(std::vector<at::Tensor> parameters, std::string why) {
    hooks_.reset();
    parameters_ = std::move(parameters);
    why_ = std::move(why);
    if (parameters_.empty()) return;
    auto weak = static_cast<Reducer&>(state()).weak_from_this();
    hooks_ = std::make_unique<GradHooks>(
        parameters_,
        [this, weak](size_t index, const at::Tensor&) {
          if (auto reducer = weak.lock()) on_foreign_gradient(*reducer, index);
        },
        nullptr);
  }

  void on_origin(Forwards::Answer& answer) override {
    if (!hooks_ || answer.origin != Origin::kSynchronized) return;
    const std::vector<char> part = hooks_->taking_part();
    for (size_t i = 0; i < part.size(); ++i)
      if (part[i] > 0) refuse(i);
  }

 private:
  // A gradient that the graph has not shown: inside of a reentrant checkpoint, or in another thread's backward.
  void on_foreign_gradient(Reducer& reducer, size_t index) const {
    auto lock = reducer.guard();
    reducer.enter_backward(std::nullopt);
    if (reducer.backward.is_synchronized()) refuse(index);
  }
  // Autograd adds nothing to a parameter that was frozen after its graph was made.
  void refuse(size_t index) const {
    if (parameters_[index].requires_grad()) state().fail(why_);
  }

  std::vector<at::Tensor> parameters_;
  std::string why_;
  std::unique_ptr<GradHooks> hooks_;
};

}  // namespace minddp
