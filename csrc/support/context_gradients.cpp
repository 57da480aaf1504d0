#include "context_gradients.h"

#ifdef MINDDP_WITH_RPC

#include <torch/csrc/distributed/autograd/context/context.h>

namespace minddp {

using torch::distributed::autograd::DistAutogradContext;
using torch::distributed::autograd::ThreadLocalDistAutogradContext;

// Set by that engine on each thread while it runs nodes; a program's `with context()` alone does not set it.
bool ContextGradients::has_current() { return ThreadLocalDistAutogradContext::getContextPtr() != nullptr; }

// All of them at the first: a bucket is packed with gradients of earlier backwards in it, too.
const char* ContextGradients::fetch(size_t index, bool defined, bool begun) {
  const auto current = ThreadLocalDistAutogradContext::getContextPtr();
  if (begun && context_ != current)
    return "an iteration that is not finished has gradients elsewhere: run all of its backwards in one context, and "
           "checkpoints with use_reentrant=False";
  const auto gradients = current->getGradients();
  const auto entry = gradients.find(parameters_[index]);
  if (entry == gradients.end() && defined)
    return "a nested graph has put it into .grad: pass use_reentrant=False to checkpoints";
  if (!begun) {
    context_ = current;
    places_.clear();
    for (const at::Tensor& parameter : parameters_) {
      const auto known = gradients.find(parameter);
      places_.push_back(known == gradients.end() ? at::Tensor() : known->value());
    }
  }
  if (entry != gradients.end()) places_[index] = entry->value();
  return nullptr;
}

// An entry is written by the context's own method, under its lock. A parameter that other ranks alone have used has
// none yet: the map that getGradients() returns is the context's own, not a copy, and nobody else writes to it, since
// the graph task of this worker is over.
void ContextGradients::bring_back() {
  TORCH_CHECK(context_.use_count() > 1,
      "finalize_backward(): the context of this backward (torch.distributed.autograd.context()) is no more, and its "
      "gradients with it. Call it inside of the context's `with` block, and abort_iteration() to go on.");
  auto gradients = context_->getGradients();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!places_[i].defined()) continue;
    if (!gradients.contains(parameters_[i])) {
      gradients.insert(parameters_[i], places_[i]);
      continue;
    }
    context_->runGradCallbackForVariable(parameters_[i], [&](at::Tensor& entry) {
      const bool changed = !entry.is_same(places_[i]);
      entry = places_[i];
      return changed;
    });
  }
}

}  // namespace minddp

#else  // this torch has no RPC

namespace minddp {

bool ContextGradients::has_current() { return false; }
const char* ContextGradients::fetch(size_t, bool, bool) { return nullptr; }
void ContextGradients::bring_back() {}

}  // namespace minddp

#endif
