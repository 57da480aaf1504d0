// A case of the core's own: when things happened in the last synchronized backward, and in some before it.
// Nanoseconds of CLOCK_MONOTONIC, the clock of Python's time.monotonic_ns(). A clock read (some 25 ns) per gradient
// and seven per bucket; nothing here locks.
#pragma once

#include "events.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace minddp {

enum class StepEvent { kForwardBegin, kForwardEnd, kBackwardBegin, kBackwardEnd, kFinalizeEnd, kCount };

// One synchronized step.
struct StepStamps {
  static constexpr int64_t kNever = -1;
  using Moments = std::array<int64_t, size_t(StepEvent::kCount)>;
  using BucketTimes = std::array<int64_t, size_t(BucketMoment::kUnpacked) + 1>;
  // By bucket, when its collective had ended: written by the transport's threads, perhaps a moment after backward has
  // returned, so each iteration has its own.
  using Done = std::vector<std::atomic<int64_t>>;
  // What lies between the step before and this one's last forward. A forward arrives before it meets other ranks.
  struct Approach {
    int64_t previous_end = kNever, first_arrival = kNever, arrival = kNever;
    int64_t optimizer = 0;  // a duration: in optimizers' steps, before the first arrival
  };

  int64_t iteration = 0;  // how many have begun
  Moments step{kNever, kNever, kNever, kNever, kNever};
  Approach approach;
  std::vector<BucketTimes> buckets;
  std::shared_ptr<Done> done;

  int64_t done_at(size_t bucket) const { return (*done)[bucket].load(std::memory_order_relaxed); }
  int64_t at(StepEvent event) const { return step[size_t(event)]; }
  int64_t at(size_t bucket, BucketMoment event) const { return buckets[bucket][size_t(event)]; }
};

struct Trace : StepStamps {
  static constexpr size_t kEarlier = 31;  // with the last step 32

  std::vector<int64_t> ready;      // by parameter: its last arrival, when the gradient is whole
  std::deque<StepStamps> earlier;  // finished steps with these buckets, the oldest first
  bool whole = false;              // the step has ended, and no other has begun its backward
  Moments finished{};              // of a whole step: the next forward writes into `step`
  Approach coming;                 // of the next step
  int64_t optimizer_total = 0;

  static int64_t now() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void note(StepEvent event) { step[size_t(event)] = now(); }
  void note(size_t bucket, BucketMoment event) { buckets[bucket][size_t(event)] = now(); }
  static void note_done(Done& done, size_t bucket) { done[bucket].store(now(), std::memory_order_relaxed); }

  // A forward arrives. `optimizer_ns`: spent in optimizers' steps so far.
  void arrive(int64_t optimizer_ns) {
    coming.arrival = now();
    if (coming.first_arrival > at(StepEvent::kFinalizeEnd)) return;
    coming.first_arrival = coming.arrival;
    coming.optimizer = optimizer_ns - std::exchange(optimizer_total, optimizer_ns);
  }
  // Other buckets: what earlier ones have shown is forgotten.
  void resize(size_t parameter_count, size_t bucket_count) {
    earlier.clear();
    whole = false;
    ready.resize(parameter_count);
    buckets.resize(bucket_count);
    clear();
  }
  void begin_iteration(int64_t number) {
    if (std::exchange(whole, false)) {
      earlier.push_back(*this);
      earlier.back().step = finished;
      if (earlier.size() > kEarlier) earlier.pop_front();
    }
    clear();
    iteration = number;
    coming.previous_end = at(StepEvent::kFinalizeEnd);
    approach = coming;
    note(StepEvent::kBackwardBegin);
  }
  void end_step() {
    note(StepEvent::kFinalizeEnd);
    finished = step;
    whole = true;
  }

 private:
  void clear() {
    BucketTimes never;
    never.fill(kNever);
    ready.assign(ready.size(), kNever);
    buckets.assign(buckets.size(), never);
    done = std::make_shared<Done>(buckets.size());
    for (auto& time : *done) time.store(kNever, std::memory_order_relaxed);
  }
};

class Stamps : public Case {
 public:
  void on(Moment moment) override {
    if (moment == Moment::kForwardBegin) trace_.note(StepEvent::kForwardBegin);
    if (moment == Moment::kForwardEnd) trace_.note(StepEvent::kForwardEnd);
    if (moment == Moment::kIterationBegin) trace_.begin_iteration(state().learned.begun);
    if (moment == Moment::kBackwardEnd) trace_.note(StepEvent::kBackwardEnd);
    if (moment == Moment::kAveraged) trace_.end_step();
    if (moment == Moment::kNewBuckets) trace_.resize(state().parameters.size(), state().buckets.size());
  }
  void on(BucketMoment moment, size_t bucket) override {
    trace_.note(bucket, moment);
    if (moment == BucketMoment::kLaunched) note_end_of(bucket);
  }
  bool follows_gradients() const override { return true; }
  void on_arrival(size_t index) override { trace_.ready[index] = Trace::now(); }

  // A step begins. `optimizer_ns`: how long optimizers' steps have taken so far. To be called before any wait for
  // other ranks.
  void arrive(int64_t optimizer_ns) { trace_.arrive(optimizer_ns); }
  const Trace& trace() const { return trace_; }
  const ReducerState& reducer() const { return state(); }

 private:
  // CPU only: a device's future completes once the collective is enqueued.
  void note_end_of(size_t bucket) {
    if (!state().buckets[bucket]->device().is_cpu()) return;
    const auto note_done = [done = trace_.done, bucket](Future&) { Trace::note_done(*done, bucket); };
    state().buckets[bucket]->flight().future->addCallback(note_done, /*uses_future=*/false);
  }

  Trace trace_;
};

}  // namespace minddp
