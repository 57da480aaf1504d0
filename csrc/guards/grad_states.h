// Case: may an optimizer use this gradient? Where each parameter's gradient has come from, and so whether it is this
// rank's alone or an average.
//
// A backward is identified by its number (ReducerState::arrived_in).
#pragma once

#include "reducer/events.h"
#include "reducer/graph_task.h"
#include "same_tensor.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace minddp {

struct GradState {
  int bypassed_in = -1;          // the last backward that bypassed the wrapper; none once the gradient is averaged
  bool outside_no_sync = false;  // see left_local()
  SameTensor bypassed_grad;      // the `.grad` of `bypassed_in`; the program may have replaced it since
  // `.grad` at the begin of the last backward that was synchronized from its first notice. While an interruption is
  // noted, it is not overwritten.
  SameTensor before;
  uint32_t version = 0;  // `before`'s version counter at that moment; each write to a tensor raises it
};

class GradStates : public Case {
 public:
  static constexpr int kNone = -1;

  void on(Moment moment) override {
    if (moment == Moment::kNewBuckets) states_.resize(state().parameters.size());
    if (moment == Moment::kForwardBegin || moment == Moment::kFinalizing) forget_interruption();
    if (moment == Moment::kBackward && state().backward.is_synchronized()) note_gradients();
    if (moment == Moment::kAveraged && !state().iteration.outside_grad) note_averages();
    if (moment == Moment::kGivenUp) {
      interrupted_in_ = ended_in_ = kNone;
      forget_gradients();
    }
  }

  bool follows_gradients() const override { return true; }
  void after_accumulation(size_t index) override {
    GradState& grad = states_[index];
    if (state().bypasses(index)) {
      grad.bypassed_in = current_graph_task();
      grad.bypassed_grad = state().parameters[index].grad();
    }
    if (state().backward.origin == Origin::kLocal && state().sync_enabled) grad.outside_no_sync = true;
  }

  // An exception has ended a backward whose gradients were to be averaged. This is the only record if the exception
  // came before the first gradient.
  void on_interrupted(int graph_task, bool owes) override {
    if (owes) interrupted_in_ = graph_task;
  }

  void take_over(const Case& before, const std::vector<int64_t>& there, bool) override {
    const auto* older = dynamic_cast<const GradStates*>(&before);
    if (older == nullptr) return;
    for (size_t i = 0; i < states_.size(); ++i)
      if (there[i] >= 0) states_[i] = older->states_[there[i]];
    interrupted_in_ = older->interrupted_in_;
  }

  // --- what is asked before optimizer.step()

  bool is_interrupted() const { return interrupted_in_ != kNone; }
  // Parameters whose gradient bypassed the wrapper, each with that backward's number; only while `.grad` is still
  // that tensor. If another wrapper shares the parameter, the gradient may have come through that one: then that
  // wrapper's arrived_in is at least this number, and the caller drops the entry.
  std::vector<std::pair<size_t, int>> bypassed() const {
    std::vector<std::pair<size_t, int>> found;
    for (size_t i = 0; i < states_.size(); ++i)
      if (states_[i].bypassed_in != kNone && states_[i].bypassed_grad == state().parameters[i].grad())
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
  // The last backward that brought the gradient; or a later one that may have brought it before it failed.
  int touched_in(size_t index) const { return std::max(state().arrived_in[index], interrupted_in_); }
  // An iteration has ended in backward number `backward` or later, and no local gradient has come since. If a later
  // backward has failed, `.grad` must also be as it was when that backward began.
  bool averaged_since(size_t index, int backward) const {
    if (state().iteration.phase != Phase::kIdle || state().used_map.used_nowhere(index)) return false;
    const at::Tensor& grad = state().parameters[index].grad();
    const bool untouched = states_[index].before == grad && states_[index].version == version_of(grad);
    return !state().used[index] && ended_in_ >= backward && (ended_in_ > interrupted_in_ || untouched);
  }

 private:
  static uint32_t version_of(const at::Tensor& grad) { return grad.is_inference() ? 0 : grad._version(); }

  // A SameTensor is a weak reference, and torch.utils.swap_tensors refuses tensors that have one. So note_averages()
  // clears `before`. `bypassed_grad` must be kept longer.
  void note_gradients() {
    if (is_interrupted()) return;  // keep what was there before the interrupted backward
    for (size_t i = 0; i < states_.size(); ++i) {
      const at::Tensor& grad = state().parameters[i].grad();
      if (!grad.defined()) continue;
      states_[i].before = grad;
      states_[i].version = version_of(grad);
    }
  }
  // All that was accumulated is averaged now, except what is never averaged.
  void note_averages() {
    ended_in_ = state().iteration.last_backward;
    for (size_t i = 0; i < states_.size(); ++i) {
      states_[i].outside_no_sync = false;
      states_[i].before = SameTensor();
      if (!state().used_map.used_nowhere(i)) states_[i].bypassed_in = kNone;
    }
  }
  void forget_interruption() {
    if (is_interrupted()) forget_gradients();
    interrupted_in_ = kNone;
  }
  void forget_gradients() {
    for (GradState& grad : states_) grad.before = SameTensor();
  }

  std::vector<GradState> states_;  // by parameter
  int ended_in_ = kNone;           // the backward in which the last iteration ended
  int interrupted_in_ = kNone;     // the last backward that an exception ended and that owed averages
};

}  // namespace minddp
