#include "context_gradients.h"

#ifdef MINDDP_WITH_RPC

#include <torch/csrc/distributed/autograd/context/context.h>

namespace minddp {

using torch::distributed::autograd::DistAutogradContext;
using torch::distributed::autograd::ThreadLocalDistAutogradContext;

// Set by that engine on each thread while it runs nodes; a program's `with context()` alone does not set it.
bool ContextGradients::has_current() { return ThreadLocalDistAutogradContext::getContextPtr() != nullptr; }

// All of them at the first: a bucket is packed with gradients of earlier backwards in it, too.
const char* ContextGradients::show(size_t index, bool no_mean, bool shared, bool begun) {
  const auto current = ThreadLocalDistAutogradContext::getContextPtr();
  if (no_mean) return "its reduction is no mean: pass reduction=\"mean\"";
  if (shared) return "another wrapper reduces it in the same backward: wrap once the module that holds both";
  if (begun && context_ != current)
    return "an iteration that is not finished has gradients elsewhere: run all of its backwards in one context";
  context_ = current;
  if (!own_) show_all();
  const auto gradients = context_->getGradients();
  const auto entry = gradients.find(parameters_[index]);
  if (entry == gradients.end())
    return "a nested graph has put it into .grad: pass use_reentrant=False to checkpoints";
  parameters_[index].mutable_grad() = entry->value();
  return nullptr;
}

void ContextGradients::show_all() {
  if (own_) return;
  own_.emplace(parameters_.size());
  const auto gradients = context_->getGradients();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& grad = parameters_[i].mutable_grad();
    const auto entry = gradients.find(parameters_[i]);
    (*own_)[i] = std::exchange(grad, entry == gradients.end() ? at::Tensor() : entry->value());
  }
}

// An entry is written by the context's own method, under its lock. A parameter that other ranks alone have used has
// none yet: the map that getGradients() returns is the context's own, not a copy, and nobody else writes to it, since
// the graph task of this worker is over.
void ContextGradients::hide() {
  if (!own_) return;
  auto gradients = context_->getGradients();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor grad = std::exchange(parameters_[i].mutable_grad(), std::move((*own_)[i]));
    if (!grad.defined()) continue;
    if (!gradients.contains(parameters_[i]))
      gradients.insert(parameters_[i], grad);
    else
      context_->runGradCallbackForVariable(parameters_[i], [&](at::Tensor& entry) {
        const bool changed = !entry.is_same(grad);
        entry = grad;
        return changed;
      });
  }
  own_.reset();
}

}  // namespace minddp

#endif
