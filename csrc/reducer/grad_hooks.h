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

// What is told of a gradient: its parameter's index, and the contribution that came (undefined: none). Autograd still
// holds it while hooks run; `.grad` may be that same memory.
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
  GradHooks(const std::vector<at::Tensor>& parameters, OnReady on_ready, BeforeGrowth before)
      : on_ready_(std::move(on_ready)), before_(std::move(before)), hooked_(parameters.size()) {
    renew(parameters);
  }
  ~GradHooks() {
    for (Hooked& hooked : hooked_) remove(hooked);
  }
  GradHooks(const GradHooks&) = delete;
  GradHooks& operator=(const GradHooks&) = delete;

  // A cast, or a parametrization, gives a parameter another node. A frozen parameter has none: the hook stays on its
  // old node, which it gets back when it is unfrozen.
  void renew(const std::vector<at::Tensor>& parameters) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].requires_grad()) continue;
      NodePtr node = torch::autograd::impl::grad_accumulator(parameters[i]);
      if (node == hooked_[i].node) continue;
      remove(hooked_[i]);
      hooked_[i] = add(std::move(node), i);
    }
  }

  // Whether parameter i has another node by now.
  bool is_lost(size_t i, const at::Tensor& parameter) const {
    return parameter.requires_grad() && torch::autograd::impl::grad_accumulator(parameter) != hooked_[i].node;
  }

  // By parameter: whether the backward that runs now will accumulate into it, as far as its own graph tells.
  // Autograd's engine has walked the graph before the first hook runs; a reentrant checkpoint's graph does not exist
  // yet.
  std::vector<char> taking_part() const {
    const GraphTaskNodes nodes;
    std::vector<char> takes_part(hooked_.size());
    for (size_t i = 0; i < hooked_.size(); ++i) takes_part[i] = nodes.accumulates(hooked_[i].node.get());
    return takes_part;
  }

 private:
  // A shared_ptr up to torch 2.11, an intrusive_ptr in 2.13: let the compiler name it. Held, because a
  // parameter keeps only a weak reference to its AccumulateGrad node.
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));
  struct Hooked {
    NodePtr node;
    uintptr_t key = 0;
    torch::autograd::FunctionPreHook* before = nullptr;
  };

  // In no order that anybody may rely on: other libraries have hooks on the same nodes.
  Hooked add(NodePtr node, size_t i) {
    Hooked added{std::move(node)};
    added.key = added.node->add_post_hook(std::make_unique<AfterAccumulation>(on_ready_, i));
    if (!before_) return added;
    auto pre = std::make_unique<BeforeNode>([before = before_, i] { before(i); });
    added.before = pre.get();
    added.node->add_pre_hook(std::move(pre));
    return added;
  }
  // By key, and by address.
  static void remove(const Hooked& hooked) {
    if (!hooked.node) return;
    hooked.node->del_post_hook(hooked.key);
    if (hooked.before)
      std::erase_if(hooked.node->pre_hooks(), [&](const auto& hook) { return hook.get() == hooked.before; });
  }

  const OnReady on_ready_;
  const BeforeGrowth before_;
  std::vector<Hooked> hooked_;
};

}  // namespace minddp
