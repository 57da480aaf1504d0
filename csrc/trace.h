// When things happened: the last synchronized backward's timestamps.
//
// Always on. A timestamp is a clock read (some 25 ns), one per gradient and six per bucket, into
// arrays that were sized once; nothing here allocates or locks during a backward. Times are
// nanoseconds of CLOCK_MONOTONIC, the clock of Python's time.monotonic_ns().
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace minddp {

enum class BucketEvent { kReady, kPackBegin, kLaunch, kDone, kUnpackBegin, kUnpackEnd, kCount };
enum class StepEvent { kForwardBegin, kForwardEnd, kBackwardBegin, kBackwardEnd, kFinalizeEnd, kCount };

class Trace {
 public:
  static constexpr int64_t kNever = -1;

  static int64_t now() {
    auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  }

  void resize(size_t parameters, size_t buckets) {
    ready_.assign(parameters, kNever);
    buckets_.assign(buckets * kBucketEvents, kNever);
  }

  void begin_step() {
    resize(ready_.size(), buckets_.size() / kBucketEvents);
    ++iteration_;
  }

  void step(StepEvent event) { step_[static_cast<size_t>(event)] = now(); }
  void ready(size_t parameter) { ready_[parameter] = now(); }
  void bucket(size_t bucket, BucketEvent event) { *slot(bucket, event) = now(); }

  int64_t* slot(size_t bucket, BucketEvent event) {
    return &buckets_[bucket * kBucketEvents + static_cast<size_t>(event)];
  }

  int64_t iteration() const { return iteration_; }
  int64_t at(StepEvent event) const { return step_[static_cast<size_t>(event)]; }
  const std::vector<int64_t>& ready() const { return ready_; }
  int64_t at(size_t bucket, BucketEvent event) const {
    return buckets_[bucket * kBucketEvents + static_cast<size_t>(event)];
  }

 private:
  static constexpr size_t kBucketEvents = static_cast<size_t>(BucketEvent::kCount);

  int64_t iteration_ = 0;  // synchronized backwards so far
  int64_t step_[static_cast<size_t>(StepEvent::kCount)] = {kNever, kNever, kNever, kNever, kNever};
  std::vector<int64_t> ready_;
  std::vector<int64_t> buckets_;
};

}  // namespace minddp
