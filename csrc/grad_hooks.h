// From autograd into the reducer.
//
// autograd adds a parameter's gradient into `.grad` in a node called AccumulateGrad. A post hook on that
// node is the one place where "this gradient is there now" is known while backward still runs.
//
// Hooks run on autograd's threads, without the GIL: the thread that called backward() for CPU gradients,
// one thread a device for the others.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <vector>

namespace minddp {

using torch::autograd::variable_list;

// An autograd hook that tells of its node and changes nothing.
template <typename Hook>
struct Teller : Hook {
  explicit Teller(std::function<void()> tell) : tell(std::move(tell)) {}
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(false,
        "minddp's hooks do not run under compiled autograd: unset "
        "torch._dynamo.config.compiled_autograd (torch.compile of the model itself works).");
  }
  const std::function<void()> tell;
};

struct AfterNode : Teller<torch::autograd::FunctionPostHook> {
  using Teller::Teller;
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    tell();
    return outputs;  // AccumulateGrad has none: nothing is copied
  }
};

struct BeforeNode : Teller<torch::autograd::FunctionPreHook> {
  using Teller::Teller;
  variable_list operator()(const variable_list& grads) override {
    tell();
    return grads;
  }
};

// A hook on every parameter, until it goes away.
class GradHooks {
 public:
  GradHooks(const std::vector<at::Tensor>& parameters, const std::function<void(size_t index)>& on_ready) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      NodePtr node = torch::autograd::impl::grad_accumulator(parameters[i]);
      uintptr_t key = node->add_post_hook(std::make_unique<AfterNode>([on_ready, i] { on_ready(i); }));
      hooked_.emplace_back(std::move(node), key);
    }
  }
  ~GradHooks() {
    for (auto& [node, key] : hooked_) node->del_post_hook(key);
  }

 private:
  // A shared_ptr up to torch 2.11, an intrusive_ptr in 2.13: let the compiler name it. Held, because a
  // parameter keeps only a weak reference to its AccumulateGrad node.
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));
  std::vector<std::pair<NodePtr, uintptr_t>> hooked_;
};

// Calls `on_backward` when backward reaches a node that made one of `outputs`, before that node runs. The
// hook lives as long as the graph does.
inline void watch_outputs(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_backward) {
  for (const at::Tensor& output : outputs)
    if (auto node = output.grad_fn()) node->add_pre_hook(std::make_unique<BeforeNode>(on_backward));
}

}  // namespace minddp
