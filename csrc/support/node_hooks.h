// Hooks on autograd's nodes that look and change nothing; and on those that made a forward's outputs.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

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
  explicit BeforeNode(const std::function<void()>& tell) : tell(tell) {}
  variable_list operator()(const variable_list& grads) override {
    tell();
    return grads;
  }
  const std::function<void()> tell;
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

}  // namespace minddp
