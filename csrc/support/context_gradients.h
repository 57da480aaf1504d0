// Gradients that do not go to `.grad`: a backward of distributed autograd (torch.distributed.autograd.backward, RPC)
// puts them into its context, a map from parameter to gradient that each worker keeps for it.
//
// The reducer knows `.grad` alone. So while such a backward runs, the context's gradients stand there, and what stood
// there waits here; at its end both go back to where they belong. Threads: the reducer's; no lock of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#ifdef MINDDP_WITH_RPC
namespace torch::distributed::autograd {
class DistAutogradContext;
}
#endif

namespace minddp {

#ifdef MINDDP_WITH_RPC

class ContextGradients {
 public:
  explicit ContextGradients(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {}

  // Whether the backward that runs on this thread is one of distributed autograd's.
  static bool has_current();
  // Whether the gradients that have come since leave() are a context's.
  bool in_use() const { return context_ != nullptr; }
  // The gradient of parameter `index` has come, in this thread's backward, of an iteration that has `begun` or not.
  // Null where it stands in `.grad` now; else why not, and the way out.
  const char* show(size_t index, bool no_mean, bool shared, bool begun);
  void show_all();  // REQUIRES: in_use()
  // `.grad` is what it was before; what was made of the context's gradients meanwhile is the context's.
  void hide();
  // The same, and no context is in use any more; false where none was.
  bool leave() {
    hide();
    return std::exchange(context_, nullptr) != nullptr;
  }

 private:
  const std::vector<at::Tensor>& parameters_;
  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
  std::optional<std::vector<at::Tensor>> own_;  // while the context's are shown: what `.grad` was
};

#else  // this torch has no RPC

class ContextGradients {
 public:
  explicit ContextGradients(const std::vector<at::Tensor>&) {}
  static bool has_current() { return false; }
  bool in_use() const { return false; }
  const char* show(size_t, bool, bool, bool) { return nullptr; }
  void show_all() {}
  void hide() {}
  bool leave() { return false; }
};

#endif

}  // namespace minddp
