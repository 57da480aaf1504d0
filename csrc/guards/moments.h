// Case: when this rank's forward and backward last began and ended, to be reported to the ranks that wait for it.
#pragma once

#include "reducer/events.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace minddp {

// A thread that watches may read while a step runs: each moment is atomic, and the array may be half of the next
// step.
class Moments : public Case {
 public:
  void on(Moment moment) override {
    if (moment == Moment::kForwardBegin) note(0);
    if (moment == Moment::kForwardEnd) note(1);
    if (moment == Moment::kIterationBegin) note(2), ++begun_;
    if (moment == Moment::kBackwardEnd) note(3);
    if (moment == Moment::kAveraged) note(4), averaged_ = begun_.load();
  }
  // Nanoseconds of the clock of time.monotonic_ns(), or -1: forward's begin and end; backward's begin and end, as far
  // as it is synchronized; the averages.
  std::array<int64_t, 5> last() const { return {at_[0], at_[1], at_[2], at_[3], at_[4]}; }
  // How many iterations have begun, and which was the last one to be averaged. May be asked when the reducer is gone.
  std::array<int64_t, 2> counts() const { return {begun_, averaged_}; }

 private:
  void note(size_t i) {
    at_[i].store(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(),
        std::memory_order_relaxed);
  }
  std::array<std::atomic<int64_t>, 5> at_{-1, -1, -1, -1, -1};
  std::atomic<int64_t> begun_ = 0, averaged_ = 0;
};

}  // namespace minddp
