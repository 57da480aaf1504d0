// Case: the program has collectives of its own in backward (synchronized batch norm, gathered losses), in the
// reducer's process group.
//
// Ranks match a group's collectives by their order. If gradients come in another order on one rank (a branch, a term
// times zero), a small bucket of them may leave before the program's collective there, and after it elsewhere. So
// where the first iteration has such a collective, buckets are cut as torch's class cuts them
// (Reducer._rebuild_buckets): then they leave where they do with torch's class.
#pragma once

#include "reducer/state.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace minddp {

class ProgramCollectives : public Case {
 public:
  ProgramCollectives(const ReducerState& state, c10d::ProcessGroup& group) : state_(state), group_(group) {}

  // Whether there was one in a backward, as far as the group counts its collectives. It looks no further.
  bool found() {
    looks_ = false;
    return found_;
  }

  void on_backward(Forwards::Answer&) override { look(); }
  // Between two gradients without a launch, only the program has sent something.
  void on_arrival(ArrivedGradient&) override {
    const uint64_t sent = sent_;
    const size_t launched = launched_;
    look();
    found_ |= looks_ && launched == launched_ && sent != sent_;
  }

 private:
  void look() {
    if (!looks_) return;
    try {
      sent_ = group_.getSequenceNumberForGroup();
      launched_ = state_.iteration.next_bucket;
    } catch (const c10::Error&) {  // a backend that does not count
      looks_ = false;
    }
  }

  const ReducerState& state_;
  c10d::ProcessGroup& group_;
  bool looks_ = true, found_ = false;
  uint64_t sent_ = 0;  // when the last gradient came, or the backward began
  size_t launched_ = 0;
};

}  // namespace minddp
