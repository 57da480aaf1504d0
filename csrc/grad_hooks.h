// From autograd into the reducer.
//
// autograd adds a parameter's gradient into `.grad` in a node called AccumulateGrad. A post hook on
// that node is the one place where "this gradient is there now" is known while backward still runs.
// GradHooks puts one on every parameter and takes them off again when it goes away. `watch_outputs`
// marks where backward starts: at the nodes that made forward's outputs.
//
// Hooks run on autograd's threads, without the GIL: the caller's own thread for CPU gradients, one
// thread per device for the others.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace minddp {

class GradHooks {
 public:
  using OnReady = std::function<void(size_t index)>;

  GradHooks(const std::vector<at::Tensor>& parameters, OnReady on_ready);
  ~GradHooks() { remove(); }
  GradHooks(const GradHooks&) = delete;
  GradHooks& operator=(const GradHooks&) = delete;

  void remove();

 private:
  // A shared_ptr up to torch 2.11, an intrusive_ptr in 2.13: let the compiler name it. Held, because
  // the parameter itself keeps only a weak reference to its AccumulateGrad node.
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

  struct Hooked {
    NodePtr node;
    uintptr_t key;
  };
  std::vector<Hooked> hooked_;
};

// Calls `on_backward` when backward reaches a node that made one of `outputs` (before that node
// runs). The hook lives as long as the graph does.
void watch_outputs(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_backward);

}  // namespace minddp
