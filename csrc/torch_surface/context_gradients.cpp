#include "context_gradients.h"

#include "errors.h"

#ifdef MINDDP_WITH_RPC
#include <torch/csrc/distributed/autograd/context/container.h>
#endif

namespace minddp {

static bool has_current();  // whether the backward that runs on this thread is one of distributed autograd's

void ContextGradients::on_gradient(ArrivedGradient& gradient) {
  const bool current = has_current();
  if (current) {
    gradient.in_grad = false;
    gradient.defined = gradient.contribution.defined();
  }
  if (!state().backward.is_synchronized() || (!current && !context_)) return;
  const bool begun = state().iteration.phase != Phase::kIdle;
  const char* why = refusal_.empty() ? fetch(gradient, begun) : refusal_.c_str();
  if (why) state().fail(errors::context_gradient(state().rank, state().names[gradient.index], why));
  if (!begun) enter();
}

// From here on the iteration is like any other.
void ContextGradients::enter() {
  used_ = state().used;
  for (size_t i = 0; i < places_.size(); ++i) state().used[i] = places_[i].defined();
  for (auto& bucket : state().buckets) bucket->move_gradients(&places_);
}

// Averaged, the context gets the results; given up, it keeps this rank's own.
void ContextGradients::on(Moment moment) {
  if (!context_) return;
  if (moment == Moment::kIterationBegin) state().iteration.outside_grad = true;
  if (moment == Moment::kAveraged) bring_back();
  if (moment == Moment::kAveraged || moment == Moment::kGivenUp) leave();
}

void ContextGradients::leave() {
  state().used = used_;
  context_.reset();
  places_.clear();
  for (auto& bucket : state().buckets) bucket->move_gradients(nullptr);
}

#ifdef MINDDP_WITH_RPC

using torch::distributed::autograd::DistAutogradContainer;
using torch::distributed::autograd::DistAutogradContext;
using torch::distributed::autograd::ThreadLocalDistAutogradContext;

// Set by that engine on each thread while it runs nodes; a program's `with context()` alone does not set it.
static bool has_current() { return ThreadLocalDistAutogradContext::getContextPtr() != nullptr; }

// All of them at the first: a bucket is packed with gradients of earlier backwards in it, too. Null where the
// gradient lies in its place now; else why not, and the way out.
const char* ContextGradients::fetch(const ArrivedGradient& gradient, bool begun) {
  const auto current = ThreadLocalDistAutogradContext::getContextPtr();
  if (begun && context_ != current)
    return "an iteration that is not finished has gradients elsewhere: run all of its backwards in one context, and "
           "checkpoints with use_reentrant=False";
  const auto gradients = current->getGradients();
  const auto entry = gradients.find(state().parameters[gradient.index]);
  if (entry == gradients.end() && gradient.defined)
    return "a nested graph has put it into .grad: pass use_reentrant=False to checkpoints";
  if (!begun) {
    context_ = current;
    places_.clear();
    for (const at::Tensor& parameter : state().parameters) {
      const auto known = gradients.find(parameter);
      places_.push_back(known == gradients.end() ? at::Tensor() : known->value());
    }
  }
  if (entry != gradients.end()) places_[gradient.index] = entry->value();
  return nullptr;
}

// Not by counting references: a thread of the engine may hold the last one a moment longer.
static bool is_known(const DistAutogradContext& context) {
  try {
    return DistAutogradContainer::getInstance().retrieveContext(context.contextId()).get() == &context;
  } catch (const c10::Error&) {
    return false;
  }
}

// An entry is written by the context's own method, under its lock. A parameter that other ranks alone have used has
// none yet: the map that getGradients() returns is the context's own, not a copy, and nobody else writes to it, since
// the graph task of this worker is over.
void ContextGradients::bring_back() {
  TORCH_CHECK(is_known(*context_),
      "finalize_backward(): the context of this backward (torch.distributed.autograd.context()) is no more, and its "
      "gradients with it. Call it inside of the context's `with` block, or minddp.abort_iteration(ddp) to go on.");
  auto gradients = context_->getGradients();
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!places_[i].defined()) continue;
    if (!gradients.contains(state().parameters[i])) {
      gradients.insert(state().parameters[i], places_[i]);
      continue;
    }
    context_->runGradCallbackForVariable(state().parameters[i], [&](at::Tensor& entry) {
      const bool changed = !entry.is_same(places_[i]);
      entry = places_[i];
      return changed;
    });
  }
}

#else  // this torch has no RPC

static bool has_current() { return false; }
const char* ContextGradients::fetch(const ArrivedGradient&, bool) { return nullptr; }
void ContextGradients::bring_back() {}

#endif

}  // namespace minddp
