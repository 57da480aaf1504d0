// Where each parameter's gradient has come from, and so whether it is this rank's alone or an average.
//
// The one place that knows: the reducer notes arrivals and ends of iterations here, and whoever asks whether an
// optimizer may use a gradient is answered from here. Backwards are known by autograd's numbers of their graph tasks,
// which grow, and which all wrappers of a parameter see alike.
#pragma once

#include "iteration.h"
#include "support/same_tensor.h"

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace minddp {

struct GradState {
  int bypassed_in = -1;          // the last backward that bypassed the wrapper and was not averaged since
  int arrived_in = -1;           // the last one through a forward of the wrapper
  bool outside_no_sync = false;  // local, though its backward ran where gradients are synchronized
  SameTensor bypassed_grad;      // where the bypassing one went; `.grad` may have been replaced since
  SameTensor result;             // of the last reduction, where that was a sum
  SameTensor before;             // `.grad` when the backward that runs began
  uint32_t version = 0;          // its, then: autograd counts what is written to a tensor
};

class GradStates {
 public:
  static constexpr int kNone = -1;
  explicit GradStates(size_t count) : used(count, 0), states_(count) {}

  // By parameter: 1 where a (defined) gradient has arrived since the last synchronization. The next one sends what
  // no_sync left. (torch's local_used_map.)
  std::vector<int32_t> used;

  GradState& operator[](size_t index) { return states_[index]; }
  const GradState& operator[](size_t index) const { return states_[index]; }

  // `never_sent`: a static graph excluded it. `within_no_sync`: backward runs there.
  void arrived(
      size_t index, Origin origin, int graph_task, const at::Tensor& grad, bool never_sent, bool within_no_sync) {
    GradState& state = states_[index];
    const bool bypassed = origin == Origin::kBypassed || (never_sent && origin == Origin::kLocal);
    (bypassed ? state.bypassed_in : state.arrived_in) = graph_task;
    if (bypassed) state.bypassed_grad = grad;
    if (origin == Origin::kLocal && !within_no_sync) state.outside_no_sync = true;
  }
  // Weak references are held for the length of a backward alone: torch.utils.swap_tensors refuses them.
  void backward_begins(const std::vector<at::Tensor>& parameters) {
    for (size_t i = 0; i < states_.size(); ++i) {
      const at::Tensor& grad = parameters[i].grad();
      if (!grad.defined()) continue;
      states_[i].before = grad;
      states_[i].version = version_of(grad);
    }
  }
  // An exception has ended a backward whose gradients were to be averaged. If none of our gradients had come yet,
  // only this records it.
  void interrupted(int graph_task) { interrupted_in_ = graph_task; }
  void forget_interruption() {
    if (is_interrupted()) forget_before();
    interrupted_in_ = kNone;
  }
  bool is_interrupted() const { return interrupted_in_ != kNone; }
  // The iteration ends in this backward: its last buckets leave now.
  void iteration_ends_in(int graph_task) { ended_in_ = graph_task; }
  // What was accumulated is averaged now, except what is never sent.
  void averaged(const auto& never_sent) {
    std::fill(used.begin(), used.end(), 0);
    for (size_t i = 0; i < states_.size(); ++i) {
      states_[i].outside_no_sync = false;
      states_[i].before = SameTensor();
      if (!never_sent(i)) states_[i].bypassed_in = kNone;
    }
  }
  void given_up() {
    interrupted_in_ = ended_in_ = kNone;
    forget_before();
  }
  // Of the same parameters, as another reducer knows them, by their index `there` or -1. Another
  // group's results do not count here.
  void take_over(const GradStates& before, const std::vector<int64_t>& there, bool same_group) {
    for (size_t i = 0; i < states_.size(); ++i) {
      if (there[i] < 0) continue;
      used[i] = before.used[there[i]];
      states_[i] = before.states_[there[i]];
      if (!same_group) states_[i].result = SameTensor();
    }
    interrupted_in_ = before.interrupted_in_;
  }
  // As they were, but for a backward that was interrupted since.
  void restore(const GradStates& before) {
    const int interrupted_in = interrupted_in_;
    *this = before;
    interrupted_in_ = interrupted_in;
  }

  // --- what is asked before optimizer.step() ---

  // Parameters whose gradient bypassed the wrapper, and the backward that it came in. By identity of `.grad`: once
  // zeroed to None, or replaced, it is gone. If another wrapper's arrived_in is as large, it came through that one's
  // forward.
  std::vector<std::pair<size_t, int>> bypassed(const std::vector<at::Tensor>& parameters) const {
    std::vector<std::pair<size_t, int>> found;
    for (size_t i = 0; i < states_.size(); ++i)
      if (states_[i].bypassed_in != kNone && states_[i].bypassed_grad == parameters[i].grad())
        found.emplace_back(i, states_[i].bypassed_in);
    return found;
  }
  // Parameters with a gradient of a forward under no_sync whose backward ran outside of it, not synchronized since.
  std::vector<size_t> left_local() const {
    std::vector<size_t> found;
    for (size_t i = 0; i < states_.size(); ++i)
      if (states_[i].outside_no_sync) found.push_back(i);
    return found;
  }
  int arrived_in(size_t index) const { return states_[index].arrived_in; }
  // The last backward that brought it, or may have before an exception ended that one.
  int touched_in(size_t index) const { return std::max(states_[index].arrived_in, interrupted_in_); }
  // An iteration has ended in that backward or since, and nothing local has come after it. REQUIRES: between
  // iterations. After an interruption nobody has noted what came: then it must be as it was before.
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
  int interrupted_in_ = kNone;  // the last that an exception has ended, until the next forward
};

}  // namespace minddp
