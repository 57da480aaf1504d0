// From autograd into the reducer.
//
// Autograd adds a parameter's gradient to `.grad` in a node called AccumulateGrad. A post hook on that node runs when
// the gradient is there, while backward still runs.
//
// Hooks run on autograd's threads, without the GIL. CPU gradients come on the thread that called backward(), other
// gradients on one thread per device.
#pragma once

#include "graph_task.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <unordered_set>
#include <vector>

namespace minddp {

using torch::autograd::variable_list;

// An autograd hook that changes nothing.
template <typename Hook>
struct Observer : Hook {
  // Compiled autograd asks every hook for its arguments; it would run the backward in a graph of its own.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(false,
        "minddp's hooks do not run under compiled autograd: unset "
        "torch._dynamo.config.compiled_autograd (torch.compile of the model itself works).");
  }
};

struct BeforeNode : Observer<torch::autograd::FunctionPreHook> {
  explicit BeforeNode(const std::function<void()>& call) : call(call) {}
  variable_list operator()(const variable_list& grads) override {
    call();
    return grads;
  }
  const std::function<void()> call;
};

// Calls `on_backward` when backward reaches a node that made one of `outputs`, before that node runs. The
// hook lives as long as the graph does. A node gets one hook, even if it made many outputs (unbind, split): each hook
// copies the list of all the node's gradients, so with a hook for each output, time would grow with the square of
// their number.
inline void watch_outputs(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_backward) {
  std::unordered_set<const torch::autograd::Node*> watched;
  auto watch = [&](const auto& node) {
    if (node && watched.insert(node.get()).second) node->add_pre_hook(std::make_unique<BeforeNode>(on_backward));
  };
  for (const at::Tensor& output : outputs) {
    watch(output.grad_fn());
    // Changed in place, a view gets another node, above its base's.
    if (output.is_view()) watch(output._base().grad_fn());
  }
}

// What the hook reports about a gradient: its parameter's index, and the contribution (undefined: none). Autograd
// still holds the contribution while hooks run; `.grad` may be the same memory.
using OnReady = std::function<void(size_t index, const at::Tensor& contribution)>;
// Called just before autograd adds to `.grad`.
using BeforeAccumulation = std::function<void(size_t index)>;

struct AfterAccumulation : Observer<torch::autograd::FunctionPostHook> {
  AfterAccumulation(const OnReady& on_ready, size_t index) : on_ready(on_ready), index(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    on_ready(index, inputs[0]);
    return outputs;  // AccumulateGrad has none: nothing is copied
  }
  const OnReady on_ready;
  const size_t index;
};

// Hooks on all parameters that require a gradient; the destructor removes them.
class GradHooks {
 public:
  // `before` may be empty.
  GradHooks(const std::vector<at::Tensor>& parameters, OnReady on_ready, BeforeAccumulation before)
      : on_ready_(std::move(on_ready)), before_(std::move(before)), hooked_(parameters.size()) {
    renew(parameters);
  }
  ~GradHooks() {
    for (const Nodes& nodes : hooked_) std::ranges::for_each(nodes, remove);
  }
  GradHooks(const GradHooks&) = delete;
  GradHooks& operator=(const GradHooks&) = delete;

  // A cast, or a parametrization, gives a parameter another node. A graph that was made before still brings its
  // gradients to the older one, which keeps its hook while that graph lives. A parameter that is frozen later keeps
  // its hook: when it is unfrozen, autograd returns the same node.
  void renew(const std::vector<at::Tensor>& parameters) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!is_lost(i, parameters[i])) continue;
      std::erase_if(hooked_[i], [](const Hooked& hooked) { return hooked.node.use_count() == 1; });
      hooked_[i].push_back(add(torch::autograd::impl::grad_accumulator(parameters[i]), i));
    }
  }

  // Whether parameter i has another node by now.
  bool is_lost(size_t i, const at::Tensor& parameter) const {
    const Nodes& nodes = hooked_[i];
    return parameter.requires_grad() &&
        (nodes.empty() || nodes.back().node != torch::autograd::impl::grad_accumulator(parameter));
  }

  // By parameter: how often the running backward's own graph accumulates into it: once for each of its nodes.
  // Autograd's engine has walked that graph before the first hook runs. A reentrant checkpoint's graph does not exist
  // yet.
  std::vector<char> taking_part() const {
    const GraphTaskNodes nodes;
    std::vector<char> takes_part(hooked_.size());
    const auto accumulates = [&](const Hooked& hooked) { return nodes.accumulates(hooked.node.get()); };
    for (size_t i = 0; i < hooked_.size(); ++i)
      takes_part[i] = static_cast<char>(std::ranges::count_if(hooked_[i], accumulates));
    return takes_part;
  }

 private:
  // NodePtr is a shared_ptr or an intrusive_ptr, by torch's version. A Hooked owns its node, because a parameter
  // keeps only a weak reference to its AccumulateGrad.
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));
  struct Hooked {
    NodePtr node;
    uintptr_t key = 0;
    torch::autograd::FunctionPreHook* before = nullptr;
  };
  using Nodes = std::vector<Hooked>;  // of one parameter, the present one last

  // Do not rely on the order of hooks: other libraries have hooks on the same nodes.
  Hooked add(NodePtr node, size_t i) {
    Hooked added{std::move(node)};
    added.key = added.node->add_post_hook(std::make_unique<AfterAccumulation>(on_ready_, i));
    if (!before_) return added;
    auto pre = std::make_unique<BeforeNode>([before = before_, i] { before(i); });
    added.before = pre.get();
    added.node->add_pre_hook(std::move(pre));
    return added;
  }
  // The post hook is found by its key, the pre hook by its address.
  static void remove(const Hooked& hooked) {
    hooked.node->del_post_hook(hooked.key);
    if (hooked.before)
      std::erase_if(hooked.node->pre_hooks(), [&](const auto& hook) { return hook.get() == hooked.before; });
  }

  const OnReady on_ready_;
  const BeforeAccumulation before_;
  std::vector<Nodes> hooked_;
};

}  // namespace minddp
