// Gradients that do not go to `.grad`: a backward of distributed autograd (torch.distributed.autograd.backward, RPC)
// puts them into its context, a map from parameter to gradient that each worker keeps for it.
//
// The reducer works with a place for each gradient, which is `.grad` as a rule. For such a backward it is one here,
// filled from the context as gradients come, and brought back to it at the end of the iteration: `.grad` is not
// touched. Threads: the reducer's; no lock of its own. A context may destroy a graph with its own lock held, and call
// back from there: nothing that happens then may ask the context.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#ifdef MINDDP_WITH_RPC
namespace torch::distributed::autograd {
class DistAutogradContext;
}
#endif

namespace minddp {

class ContextGradients {
 public:
  explicit ContextGradients(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {}

  // Whether the backward that runs on this thread is one of distributed autograd's.
  static bool has_current();
  // Whether the gradients that have come since forget() are a context's.
  bool in_use() const { return context_ != nullptr; }
  // The gradient of parameter `index` has come, `defined` or not, in this thread's backward, of an iteration that has
  // `begun` or not. Null where it lies in its place now; else why not, and the way out.
  const char* fetch(size_t index, bool defined, bool begun);
  at::Tensor& place(size_t index) { return places_[index]; }  // REQUIRES: in_use()
  // What has been made of the gradients is the context's. REQUIRES: in_use()
  void bring_back();
  void forget() {
    context_.reset();
    places_.clear();
  }

 private:
  const std::vector<at::Tensor>& parameters_;
#ifdef MINDDP_WITH_RPC
  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
#else
  std::shared_ptr<void> context_;
#endif
  std::vector<at::Tensor> places_;
};

// Iterations with such gradients, of a reducer that knows by `Usage` what `.grad` holds: that waits for their end.
template <class Usage>
class ContextIterations : public ContextGradients {
 public:
  using ContextGradients::ContextGradients;

  // fetch(); at the first of an iteration, `usage` and `buckets` are the context's gradients' from then on.
  template <class Buckets>
  const char* enter(size_t index, bool defined, bool begun, Usage& usage, Buckets& buckets) {
    const char* why = fetch(index, defined, begun);
    if (why || begun) return why;
    of_grad_ = usage;
    for (size_t i = 0; i < usage.local_used_map.size(); ++i) usage.local_used_map[i] = place(i).defined();
    for (auto& bucket : buckets) bucket.move_to(*this);
    return nullptr;
  }
  // `.grad`'s again, where they are not. `done`: the context gets the results, and else keeps this rank's own.
  template <class Buckets>
  void leave(bool done, Usage& usage, Buckets& buckets) {
    if (!in_use()) return;
    if (done) bring_back();
    for (size_t i = 0; i < usage.local_used_map.size(); ++i) usage.take_over(i, *of_grad_, i);
    forget();
    for (auto& bucket : buckets) bucket.move_to(*this);
  }

 private:
  std::optional<Usage> of_grad_;
};

}  // namespace minddp
