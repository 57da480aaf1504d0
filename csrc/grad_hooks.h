// From autograd into the reducer.
//
// autograd adds a parameter's gradient into `.grad` in a node called AccumulateGrad. A post hook on that
// node is the one place where "this gradient is there now" is known while backward still runs.
//
// Hooks run on autograd's threads, without the GIL: the thread that called backward() for CPU gradients,
// one thread a device for the others.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <vector>

namespace minddp {

// Puts a hook on every parameter; takes them off again when it goes away.
class GradHooks {
 public:
  using OnReady = std::function<void(size_t index)>;
  GradHooks(const std::vector<at::Tensor>& parameters, const OnReady& on_ready);
  ~GradHooks();

 private:
  // A shared_ptr up to torch 2.11, an intrusive_ptr in 2.13: let the compiler name it. Held, because a
  // parameter keeps only a weak reference to its AccumulateGrad node.
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));
  std::vector<std::pair<NodePtr, uintptr_t>> hooked_;
};

// Calls `on_backward` when backward reaches a node that made one of `outputs`, before that node runs.
// The hook lives as long as the graph does.
void watch_outputs(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_backward);

}  // namespace minddp
