// Case: the program has collectives of its own in backward (synchronized batch norm, gathered losses), in the
// reducer's process group.
//
// Ranks match a group's collectives by their order. Gradients may come in another order on one rank (a branch, a term
// times zero). Then a small bucket leaves before the program's collective there, and after it elsewhere. So if the
// first iteration has such a collective, Python cuts buckets as torch's class does (Reducer._rebuild_buckets): they
// then leave where torch's leave.
#pragma once

#include "reducer/state.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace minddp {

class ProgramCollectives : public Case {
 public:
  ProgramCollectives(const ReducerState& state, c10d::ProcessGroup& group) : state_(state), group_(group) {}

  // Whether there was one in the first iteration's backward, as far as the group counts its collectives.
  bool found() const { return found_; }

  void on_backward(Forwards::Answer&) override { sent_ = sent(); }
  // The reducer itself sends nothing before that backward ends (Reducer::may_grow).
  void on_arrival(ArrivedGradient&) override {
    const uint64_t before = sent_;
    sent_ = sent();
    found_ |= sent_ != before;
  }

 private:
  uint64_t sent() {
    if (!counts_ || state_.learned.iterations > 0) return sent_;
    try {
      return group_.getSequenceNumberForGroup();
    } catch (const c10::Error&) {
      counts_ = false;
      return sent_;
    }
  }

  const ReducerState& state_;
  c10d::ProcessGroup& group_;
  bool counts_ = true;  // as far as is known, the backend counts its collectives
  bool found_ = false;
  uint64_t sent_ = 0;  // when the last gradient came, or the backward began
};

}  // namespace minddp
