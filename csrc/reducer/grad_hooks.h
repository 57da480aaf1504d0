// From autograd into the reducer.
//
// autograd adds a parameter's gradient into `.grad` in a node called AccumulateGrad. A post hook on that
// node is the one place where "this gradient is there now" is known while backward still runs.
//
// Hooks run on autograd's threads, without the GIL: the thread that called backward() for CPU gradients,
// one thread a device for the others.
#pragma once

#include "support/graph_task.h"
#include "support/node_hooks.h"

#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <vector>

namespace minddp {

// What is told of a gradient: its parameter's index, and the contribution that came (undefined: none). Autograd
// keeps a reference to that one while hooks run; it may be the very memory of `.grad`.
using OnReady = std::function<void(size_t index, const at::Tensor& contribution)>;
// The same moment, before `.grad` has grown.
using BeforeGrowth = std::function<void(size_t index)>;

struct AfterAccumulation : Observer<torch::autograd::FunctionPostHook> {
  AfterAccumulation(const OnReady& on_ready, size_t index) : on_ready(on_ready), index(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    on_ready(index, inputs[0]);
    return outputs;  // AccumulateGrad has none: nothing is copied
  }
  const OnReady on_ready;
  const size_t index;
};

// Hooks on every parameter, until they go away.
class GradHooks {
 public:
  // `before` may be empty.
  GradHooks(const std::vector<at::Tensor>& parameters, const OnReady& on_ready, const BeforeGrowth& before) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      NodePtr node = torch::autograd::impl::grad_accumulator(parameters[i]);
      if (before) {
        auto pre = std::make_unique<BeforeNode>([before, i] { before(i); });
        before_.push_back(pre.get());
        node->add_pre_hook(std::move(pre));
      }
      uintptr_t key = node->add_post_hook(std::make_unique<AfterAccumulation>(on_ready, i));
      hooked_.emplace_back(std::move(node), key);
    }
  }
  // By key, and by address: other libraries have hooks on the same nodes.
  ~GradHooks() {
    for (size_t i = 0; i < hooked_.size(); ++i) {
      auto& [node, key] = hooked_[i];
      node->del_post_hook(key);
      if (before_.empty()) continue;
      auto& hooks = node->pre_hooks();
      std::erase_if(hooks, [&](const auto& hook) { return hook.get() == before_[i]; });
    }
  }

  // Whether parameter i has another node by now.
  bool is_lost(size_t i, const at::Tensor& parameter) const {
    return parameter.requires_grad() && torch::autograd::impl::grad_accumulator(parameter) != hooked_[i].first;
  }

  // By parameter: whether the backward that runs now will accumulate into it, as far as its own graph tells.
  // Autograd's engine has walked the graph before the first hook runs; a reentrant checkpoint's graph does not exist
  // yet.
  std::vector<char> taking_part() const {
    const GraphTaskNodes nodes;
    std::vector<char> takes_part(hooked_.size());
    for (size_t i = 0; i < hooked_.size(); ++i) takes_part[i] = nodes.accumulates(hooked_[i].first.get());
    return takes_part;
  }

 private:
  // A shared_ptr up to torch 2.11, an intrusive_ptr in 2.13: let the compiler name it. Held, because a
  // parameter keeps only a weak reference to its AccumulateGrad node.
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));
  std::vector<std::pair<NodePtr, uintptr_t>> hooked_;
  std::vector<torch::autograd::FunctionPreHook*> before_;
};

}  // namespace minddp
