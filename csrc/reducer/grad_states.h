// Where each parameter's gradient has come from, and so whether it is this rank's alone or an average.
//
// The reducer notes arrivals and ends of iterations here. From these notes it answers whether an optimizer may use a
// gradient. A backward is identified by its graph-task number. Numbers increase, and all wrappers see the same ones.
#pragma once

#include "forwards.h"
#include "support/same_tensor.h"

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace minddp {

struct GradState {
  int bypassed_in = -1;          // the last backward that bypassed the wrapper; none once the gradient is averaged
  int arrived_in = -1;           // the last backward that brought the gradient and did not bypass the wrapper
  bool outside_no_sync = false;  // see left_local()
  SameTensor bypassed_grad;      // the `.grad` of `bypassed_in`; the program may have replaced it since
  SameTensor result;             // the `.grad` that holds the last sum (cases/earlier_sums.h)
  // `.grad` at the begin of the last backward that was synchronized from its first sign. While an interruption is
  // noted, it is not overwritten.
  SameTensor before;
  uint32_t version = 0;  // `before`'s version counter at that moment; each write to a tensor raises it
};

class GradStates {
 public:
  static constexpr int kNone = -1;
  explicit GradStates(size_t count) : used(count, 0), states_(count) {}

  // By parameter: 1 if its hook has run with a defined `.grad` since the last synchronization, in any backward.
  // (torch's local_used_map.)
  std::vector<int32_t> used;

  GradState& operator[](size_t index) { return states_[index]; }
  const GradState& operator[](size_t index) const { return states_[index]; }

  // `never_averaged`: no rank used the parameter in a static graph's first iteration, so no average is ever written
  // to it. Then a local gradient counts as bypassing. `within_no_sync`: backward runs under no_sync. Then what
  // bypasses the wrapper is local, too: the program has asked for local gradients.
  void arrived(
      size_t index, Origin origin, int graph_task, const at::Tensor& grad, bool never_averaged, bool within_no_sync) {
    GradState& state = states_[index];
    if (origin == Origin::kBypassed && within_no_sync) origin = Origin::kLocal;
    const bool bypassed = origin == Origin::kBypassed || (never_averaged && origin == Origin::kLocal);
    (bypassed ? state.bypassed_in : state.arrived_in) = graph_task;
    if (bypassed) state.bypassed_grad = grad;
    if (origin == Origin::kLocal && !within_no_sync) state.outside_no_sync = true;
  }
  // Notes `before`. A SameTensor is a weak reference, and torch.utils.swap_tensors refuses tensors that have one. So
  // averaged() clears `before`. `bypassed_grad` and `result` must be kept longer.
  void backward_begins(const std::vector<at::Tensor>& parameters) {
    if (is_interrupted()) return;  // keep what was there before the interrupted backward
    for (size_t i = 0; i < states_.size(); ++i) {
      const at::Tensor& grad = parameters[i].grad();
      if (!grad.defined()) continue;
      states_[i].before = grad;
      states_[i].version = version_of(grad);
    }
  }
  // An exception has ended a backward whose gradients were to be averaged. This is the only
  // record if the exception came before the first gradient.
  void interrupted(int graph_task) { interrupted_in_ = graph_task; }
  void forget_interruption() {
    if (is_interrupted()) forget_before();
    interrupted_in_ = kNone;
  }
  bool is_interrupted() const { return interrupted_in_ != kNone; }
  // The iteration ends in this backward: its last buckets leave now.
  void iteration_ends_in(int graph_task) { ended_in_ = graph_task; }
  // All that was accumulated is averaged now, except what is never averaged.
  void averaged(const auto& never_averaged) {
    std::fill(used.begin(), used.end(), 0);
    for (size_t i = 0; i < states_.size(); ++i) {
      states_[i].outside_no_sync = false;
      states_[i].before = SameTensor();
      if (!never_averaged(i)) states_[i].bypassed_in = kNone;
    }
  }
  void given_up() {
    interrupted_in_ = ended_in_ = kNone;
    forget_before();
  }
  // Copies another reducer's states. `there[i]` is parameter i's index there, or -1. `result` is copied only
  // within the same group.
  void take_over(const GradStates& before, const std::vector<int64_t>& there, bool same_group);
  // Goes back to a copy that was made earlier (cases/context_gradients.h). An interruption since then stays noted.
  void restore(const GradStates& earlier);

  // --- what is asked before optimizer.step() ---

  // Parameters whose gradient bypassed the wrapper, each with that backward's number; only while `.grad` is still
  // that tensor. If another wrapper shares the parameter, the gradient may have come through that one: then that
  // wrapper's arrived_in() is at least this number, and the caller drops the entry.
  std::vector<std::pair<size_t, int>> bypassed(const std::vector<at::Tensor>& parameters) const {
    std::vector<std::pair<size_t, int>> found;
    for (size_t i = 0; i < states_.size(); ++i)
      if (states_[i].bypassed_in != kNone && states_[i].bypassed_grad == parameters[i].grad())
        found.emplace_back(i, states_[i].bypassed_in);
    return found;
  }
  // Parameters with a local gradient: the forward ran under no_sync, the backward ran outside of it. torch's class
  // does not average it either. Python warns once.
  std::vector<size_t> left_local() const {
    std::vector<size_t> found;
    for (size_t i = 0; i < states_.size(); ++i)
      if (states_[i].outside_no_sync) found.push_back(i);
    return found;
  }
  int arrived_in(size_t index) const { return states_[index].arrived_in; }
  // As arrived_in(); or a later backward that may have brought the gradient before it failed.
  int touched_in(size_t index) const { return std::max(states_[index].arrived_in, interrupted_in_); }
  // An iteration has ended in backward number `backward` or later, and no local gradient has come since. If a later
  // backward has failed, `.grad` must also be as it was when that backward began. REQUIRES: between iterations.
  bool averaged_since(size_t index, int backward, const at::Tensor& grad) const {
    const GradState& state = states_[index];
    const bool untouched = state.before == grad && state.version == version_of(grad);
    return !used[index] && ended_in_ >= backward && (ended_in_ > interrupted_in_ || untouched);
  }

 private:
  void forget_before() {
    for (GradState& state : states_) state.before = SameTensor();
  }
  static uint32_t version_of(const at::Tensor& grad) { return grad.is_inference() ? 0 : grad._version(); }

  std::vector<GradState> states_;
  int ended_in_ = kNone;        // the backward in which the last iteration ended
  int interrupted_in_ = kNone;  // the last backward that an exception ended and that owed averages
};

}  // namespace minddp
