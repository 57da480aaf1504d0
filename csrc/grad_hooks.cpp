#include "grad_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

namespace minddp {
namespace {

using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;

[[noreturn]] void refuse_compiled_autograd() {
  TORCH_CHECK(false,
      "minddp's hooks do not run under compiled autograd: unset "
      "torch._dynamo.config.compiled_autograd (torch.compile of the model itself works).");
}

struct ReadyHook : torch::autograd::FunctionPostHook {
  ReadyHook(size_t index, GradHooks::OnReady on_ready) : index(index), on_ready(std::move(on_ready)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    on_ready(index);
    return outputs;  // AccumulateGrad has none: nothing is copied
  }
  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  const size_t index;
  const GradHooks::OnReady on_ready;
};

struct BackwardHook : torch::autograd::FunctionPreHook {
  explicit BackwardHook(std::function<void()> on_backward) : on_backward(std::move(on_backward)) {}
  variable_list operator()(const variable_list& grads) override {
    on_backward();
    return grads;
  }
  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  const std::function<void()> on_backward;
};

}  // namespace

GradHooks::GradHooks(const std::vector<at::Tensor>& parameters, const OnReady& on_ready) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    NodePtr node = torch::autograd::impl::grad_accumulator(parameters[i]);
    uintptr_t key = node->add_post_hook(std::make_unique<ReadyHook>(i, on_ready));
    hooked_.emplace_back(std::move(node), key);
  }
}

GradHooks::~GradHooks() {
  for (auto& [node, key] : hooked_) node->del_post_hook(key);
}

void watch_outputs(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_backward) {
  for (const at::Tensor& output : outputs)
    if (auto node = output.grad_fn()) node->add_pre_hook(std::make_unique<BackwardHook>(on_backward));
}

}  // namespace minddp
