// Case: lazy_bucket_allocation. A bucket has memory from its first gradient to the end of its iteration.
#pragma once

#include "reducer/events.h"

namespace minddp {

class LazyMemory : public Case {
 public:
  void on(Moment moment) override {
    if (moment != Moment::kAveraged && moment != Moment::kGivenUp) return;
    for (auto& bucket : state().buckets) bucket->abandon();
  }
};

}  // namespace minddp
