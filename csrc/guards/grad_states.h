// Case: may an optimizer use this gradient? Where each parameter's gradient has come from, and so whether it is this
// rank's alone or an average.
//
// A backward is identified by its number (ReducerState::arrived_in). One SeenGradient for each parameter recognizes
// its `.grad`: as it was when it got an average, when it bypassed the wrapper, when a synchronized backward began, or
// when such a backward left the iteration incomplete; whichever was the last.
#pragma once

#include "errors.h"
#include "reducer/graph_task.h"
#include "reducer/reducer.h"
#include "reducer/seen_gradient.h"

#include <functional>
#include <utility>
#include <vector>

namespace minddp {

struct GradState {
  enum What {
    kUnknown,
    kAverage,    // the last average
    kUntouched,  // the same, and nobody had written to it when the local backward that runs began
    kMixed,      // the same, and a local gradient that was added to it
    kBypassed,   // it has bypassed the wrapper
  } what = kUnknown;
  SeenGradient seen;             // while `.grad` is this one, it is `what`
  int bypassed_in = -1;          // kBypassed: the last backward that did
  bool outside_no_sync = false;  // see suspects()
  at::Tensor partial;  // whether `seen` held a value, which awaits the rest of its iteration; undefined: it does not
  bool is_taken = false;  // it did, and was removed or zeroed before the backward that runs
  bool is(What kind, const at::Tensor& now) const { return what == kind && seen.is(now); }
};

class GradStates : public Case {
 public:
  static constexpr int kNone = -1;

  // `on_graph` is called once, in the first synchronized backward that makes a graph of its gradients.
  explicit GradStates(std::function<void()> on_graph) : on_graph_(std::move(on_graph)) {}

  void on(Moment moment) override {
    if (moment == Moment::kNewBuckets) states_.resize(state().parameters.size());
    if (moment == Moment::kForwardBegin || moment == Moment::kFinalizing) interrupted_in_ = kNone;
    if (moment == Moment::kBackward) look_before_backward();
    if (moment == Moment::kIterationBegin && state().backward.makes_graph && on_graph_)
      std::exchange(on_graph_, nullptr)();
    if (moment == Moment::kBackwardEnd) note_partial();
    if (moment == Moment::kAveraged && !state().iteration.outside_grad) note_averages();
    if (moment == Moment::kGivenUp) interrupted_in_ = kNone;  // earlier averages are averages all the same
  }

  bool follows_gradients() const override { return true; }
  void after_accumulation(size_t index) override {
    GradState& grad = states_[index];
    if (state().bypasses(index)) {
      grad.what = GradState::kBypassed;
      grad.bypassed_in = current_graph_task();
      grad.seen = state().parameters[index].grad();
    }
    if (state().backward.origin != Origin::kLocal) return;
    if (state().sync_enabled) grad.outside_no_sync = true;
    if (grad.is(GradState::kUntouched, state().parameters[index].grad())) grad.what = GradState::kMixed;
  }

  void on_arrival(size_t index) override {
    if (states_[index].is_taken) state().fail(errors::taken_between(state().rank, state().names[index]));
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
    ended_in_ = older->ended_in_;
  }

  // --- what is asked before optimizer.step()

  bool is_interrupted() const { return interrupted_in_ != kNone; }
  // Parameters whose gradient bypassed the wrapper, each with that backward's number. If another wrapper shares the
  // parameter, the gradient may have come through that one: then that wrapper's arrived_in is at least this number,
  // and the caller drops the entry.
  std::vector<std::pair<size_t, int>> bypassed() const {
    std::vector<std::pair<size_t, int>> found;
    for (size_t i = 0; i < states_.size(); ++i)
      if (states_[i].is(GradState::kBypassed, now(i))) found.emplace_back(i, states_[i].bypassed_in);
    return found;
  }
  // Parameters whose gradient this rank may have alone by mistake: the forward ran under no_sync, the backward
  // outside of it; or a local gradient was added to an average; or no backward has brought it, while a synchronized
  // forward waits for its backward. torch's class averages none of these either.
  std::vector<size_t> suspects() const {
    std::vector<size_t> found;
    const auto is_brought = [&](size_t i) {
      return state().used[i] || (states_[i].what != GradState::kUnknown && states_[i].seen.is(now(i)));
    };
    for (size_t i = 0; i < states_.size(); ++i)
      if (states_[i].outside_no_sync || states_[i].is(GradState::kMixed, now(i)) ||
          (state().forwards.awaits_backward() && now(i).defined() && !is_brought(i)))
        found.push_back(i);
    return found;
  }
  // The last backward that brought the gradient; or a later one that may have brought it before it failed.
  int touched_in(size_t index) const { return std::max(state().arrived_in.at(index), interrupted_in_); }
  // An iteration has ended in backward number `backward` or later, and no local gradient has come since. If a later
  // backward has failed, `.grad` must also be as it was when that backward began.
  bool averaged_since(size_t index, int backward) const {
    if (state().iteration.phase != Phase::kIdle || state().used_map.used_nowhere(index) || ended_in_ == kNone)
      return false;
    const bool untouched = states_.at(index).seen.is_unchanged(now(index));
    return !state().used[index] && ended_in_ >= backward && (ended_in_ > interrupted_in_ || untouched);
  }

 private:
  const at::Tensor& now(size_t index) const { return state().parameters[index].grad(); }

  void look_before_backward() {
    for (GradState& grad : states_) grad.is_taken = false;
    if (state().iteration.phase == Phase::kIncomplete) return find_taken();
    if (state().backward.origin == Origin::kLocal) return find_averages();
    if (!state().backward.is_synchronized() || is_interrupted()) return;  // keep what was there before that one
    for (size_t i = 0; i < states_.size(); ++i) {
      if (!states_[i].seen.is(now(i))) states_[i].what = GradState::kUnknown;
      if (now(i).defined()) states_[i].seen = now(i);
    }
  }
  // A backward has left the iteration incomplete. Another one may bring the same gradients again, where their buckets
  // have not left.
  void note_partial() {
    for (GradState& grad : states_) grad.partial.reset();
    const auto& reducer = static_cast<const Reducer&>(state());
    if (state().is_alone() || state().used_map.absence_is_fine() || reducer.missing().empty()) return;
    for (size_t bucket = state().iteration.next_bucket; bucket < state().buckets.size(); ++bucket)
      for (const Bucket::Slot& slot : *state().buckets[bucket]->slots()) {
        GradState& grad = states_[slot.index];
        if (!state().iteration.arrivals[slot.index] || !now(slot.index).defined()) continue;
        if (!grad.seen.is(now(slot.index))) grad.what = GradState::kUnknown;
        grad.seen = now(slot.index);
        grad.partial = has_values(now(slot.index));
      }
  }
  // Whoever has written to it, to scale it, has not taken it: one that was written to is read, once.
  void find_taken() {
    std::vector<size_t> changed, there;
    for (size_t i = 0; i < states_.size(); ++i) {
      if (!states_[i].partial.defined() || states_[i].seen.is_unchanged(now(i))) continue;
      changed.push_back(i);
      if (now(i).defined()) there.push_back(i);
    }
    const std::vector<char> keeps = with_values(state().parameters, there);
    for (size_t i : changed) states_[i].is_taken = !keeps[i] && states_[i].partial.item<bool>();
  }
  // A local backward begins. Programs zero gradients through `.data` as well, of which torch's count knows nothing:
  // so what looks like an average is read.
  void find_averages() {
    std::vector<size_t> found;
    for (size_t i = 0; i < states_.size(); ++i) {
      GradState& grad = states_[i];
      if (grad.what == GradState::kUntouched) grad.what = GradState::kAverage;
      const bool is_average = grad.what == GradState::kAverage && grad.seen.is_unchanged(now(i));
      const bool is_local = grad.is(GradState::kMixed, now(i)) || grad.is(GradState::kBypassed, now(i));
      if (is_average || is_local) found.push_back(i);
    }
    const std::vector<char> keeps = with_values(state().parameters, found);
    for (size_t i : found)
      if (!keeps[i])
        states_[i].what = GradState::kUnknown;
      else if (states_[i].what == GradState::kAverage)
        states_[i].what = GradState::kUntouched;
  }
  // All that was accumulated is averaged now, except what is never averaged.
  void note_averages() {
    ended_in_ = state().iteration.last_backward;
    for (size_t i = 0; i < states_.size(); ++i) {
      GradState& grad = states_[i];
      grad.outside_no_sync = false;
      if (state().used_map.used_nowhere(i)) continue;
      grad.what = now(i).defined() ? GradState::kAverage : GradState::kUnknown;
      if (now(i).defined()) grad.seen = now(i);
    }
  }

  std::vector<GradState> states_;  // by parameter
  int ended_in_ = kNone;           // the backward in which the last iteration ended
  int interrupted_in_ = kNone;     // the last backward that an exception ended and that owed averages
  std::function<void()> on_graph_;
};

}  // namespace minddp
