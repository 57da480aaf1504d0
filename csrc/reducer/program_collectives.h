// A case: the program has collectives of its own in backward (synchronized batch norm, gathered losses), in the
// reducer's process group.
//
// Ranks match a group's collectives by their order. Gradients may come in another order on one rank (a branch, a term
// times zero). Then a small bucket leaves before the program's collective there, and after it elsewhere. So if the
// first iteration has such a collective, Python cuts buckets as torch's class does (Averager.rebuild_buckets): they
// then leave where torch's leave.
#pragma once

#include "events.h"

namespace minddp {

class ProgramCollectives : public Case {
 public:
  // Whether there was one in the first iteration's backward, as far as the group counts its collectives.
  bool found() const { return found_; }

  void on_origin(Forwards::Answer&) override { look(/*within=*/state().iteration.phase == Phase::kIncomplete); }
  bool follows_gradients() const override { return true; }
  void on_gradient(ArrivedGradient&) override { look(/*within=*/true); }

 private:
  // `within` an iteration, what was sent since the last look without a launch is the program's, or another wrapper's.
  void look(bool within) {
    if (!counts_ || state().learned.iterations > 0) return;
    const uint64_t sent = sent_;
    const size_t launched = launched_;
    try {
      sent_ = state().group->getSequenceNumberForGroup();
    } catch (const c10::Error&) {
      counts_ = false;
    }
    launched_ = state().iteration.next_bucket;
    found_ |= within && sent_ != sent && launched_ == launched;
  }

  bool counts_ = true;  // as far as is known, the backend counts its collectives
  bool found_ = false;
  uint64_t sent_ = 0;  // at the last look
  size_t launched_ = 0;
};

}  // namespace minddp
