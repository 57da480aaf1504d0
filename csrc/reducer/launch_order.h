// The reducer's invariant as a case, for tests: a bucket leaves when it is complete or backward is over, and all
// buckets before it have left. Tests compare last() over ranks: the collectives of all ranks have one order.
#pragma once

#include "events.h"

namespace minddp {

class LaunchOrder : public Case {
 public:
  void on(Moment moment) override {
    if (moment == Moment::kIterationBegin) {
      launched_.clear();
      backward_is_over_ = false;
    }
    if (moment == Moment::kBackwardEnd) backward_is_over_ = true;
  }
  void on(BucketMoment moment, size_t bucket) override {
    if (moment != BucketMoment::kLaunch) return;
    const bool in_turn = bucket == state().iteration.next_bucket;
    if (!in_turn || !(backward_is_over_ || state().buckets[bucket]->complete()))
      state().fail(c10::str("bucket ", bucket, " leaves before its turn, which is bucket ",
          state().iteration.next_bucket, "'s, or is not complete [rank ", state().rank, "]"));
    launched_.push_back(bucket);
  }
  // The buckets of the last iteration, as they left. Buckets that were skipped are not among them.
  const std::vector<size_t>& last() const { return launched_; }

 private:
  std::vector<size_t> launched_;
  bool backward_is_over_ = false;
};

}  // namespace minddp
