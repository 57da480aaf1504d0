// Case: lazy_bucket_allocation. A bucket has memory from its first gradient to the end of its iteration.
#pragma once

#include "reducer/state.h"

namespace minddp {

class LazyMemory : public Case {
 public:
  explicit LazyMemory(ReducerState& state) : state_(state) {}
  void on_end(bool) override {
    for (auto& bucket : state_.buckets) bucket->abandon();
  }

 private:
  ReducerState& state_;
};

}  // namespace minddp
