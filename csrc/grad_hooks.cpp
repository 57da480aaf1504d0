#include "grad_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

namespace minddp {
namespace {

using torch::autograd::variable_list;

[[noreturn]] void refuse_compiled_autograd() {
  TORCH_CHECK(
      false,
      "minddp's hooks do not run under compiled autograd: unset "
      "torch._dynamo.config.compiled_autograd (torch.compile of the model itself works).");
}

struct ReadyHook : torch::autograd::FunctionPostHook {
  ReadyHook(size_t index, const GradHooks::OnReady& on_ready) : index_(index), on_ready_(on_ready) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    on_ready_(index_);
    return outputs;  // AccumulateGrad has none: nothing is copied
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

  size_t index_;
  GradHooks::OnReady on_ready_;
};

struct BackwardHook : torch::autograd::FunctionPreHook {
  explicit BackwardHook(std::function<void()> on_backward) : on_backward_(std::move(on_backward)) {}

  variable_list operator()(const variable_list& grads) override {
    on_backward_();
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

  std::function<void()> on_backward_;
};

}  // namespace

GradHooks::GradHooks(const std::vector<at::Tensor>& parameters, OnReady on_ready) {
  hooked_.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    NodePtr node = torch::autograd::impl::grad_accumulator(parameters[i]);
    TORCH_CHECK(node, "parameter ", i, " is not a leaf that requires a gradient");
    uintptr_t key = node->add_post_hook(std::make_unique<ReadyHook>(i, on_ready));
    hooked_.push_back({std::move(node), key});
  }
}

void GradHooks::remove() {
  for (const Hooked& hooked : hooked_) {
    hooked.node->del_post_hook(hooked.key);
  }
  hooked_.clear();
}

void watch_outputs(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_backward) {
  for (const at::Tensor& output : outputs) {
    if (auto node = output.grad_fn()) {
      node->add_pre_hook(std::make_unique<BackwardHook>(on_backward));
    }
  }
}

}  // namespace minddp
