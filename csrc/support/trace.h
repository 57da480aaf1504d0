// When things happened in the last synchronized backward: nanoseconds of CLOCK_MONOTONIC, the clock of Python's
// time.monotonic_ns(). Always on: a clock read (some 25 ns) per gradient and six per bucket; nothing here locks.
// `ready` also tells the order of arrival: roughly, not exactly, the reverse of the order of definition; buckets cut
// along the true order are complete sooner.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace minddp {

enum class StepEvent { kForwardBegin, kForwardEnd, kBackwardBegin, kBackwardEnd, kFinalizeEnd, kCount };
enum class BucketEvent { kReady, kPackBegin, kLaunch, kUnpackBegin, kUnpackEnd, kCount };

struct Trace {
  static constexpr int64_t kNever = -1;
  using BucketTimes = std::array<int64_t, size_t(BucketEvent::kCount)>;

  int64_t iteration = 0;  // synchronized backwards so far
  std::array<int64_t, size_t(StepEvent::kCount)> step{kNever, kNever, kNever, kNever, kNever};
  std::vector<int64_t> ready;  // by parameter: its last arrival, when the gradient is whole
  std::vector<BucketTimes> buckets;
  // By bucket, when its collective had ended: written by the transport's threads, perhaps a moment after backward has
  // returned, so each iteration has its own.
  using Done = std::vector<std::atomic<int64_t>>;
  std::shared_ptr<Done> done;

  static int64_t now() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void note(StepEvent event) { step[size_t(event)] = now(); }
  void note(size_t bucket, BucketEvent event) { buckets[bucket][size_t(event)] = now(); }
  static void note_done(Done& done, size_t bucket) { done[bucket].store(now(), std::memory_order_relaxed); }
  int64_t done_at(size_t bucket) const { return (*done)[bucket].load(std::memory_order_relaxed); }
  int64_t at(StepEvent event) const { return step[size_t(event)]; }
  int64_t at(size_t bucket, BucketEvent event) const { return buckets[bucket][size_t(event)]; }

  void resize(size_t parameter_count, size_t bucket_count) {
    BucketTimes never;
    never.fill(kNever);
    ready.assign(parameter_count, kNever);
    buckets.assign(bucket_count, never);
    done = std::make_shared<Done>(bucket_count);
    for (auto& time : *done) time.store(kNever, std::memory_order_relaxed);
  }
  void begin_backward() {
    resize(ready.size(), buckets.size());
    ++iteration;
    note(StepEvent::kBackwardBegin);
  }
};

}  // namespace minddp
