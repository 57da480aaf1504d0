// A number in shared memory that one rank raises and others wait for.
//
// Waiting spins for some microseconds, since a peer is mostly that close, and then sleeps in the
// kernel (futex), since the core that waits may be the one that a backward pass computes on. A sleep
// is bounded: the waiter wakes now and then to see whether the rank it waits for still lives.
//
// What always holds: `value` is written by its owner alone; values wrap around, so they are compared
// by difference.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace minddp::shm {

class alignas(64) Counter {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  bool reached(uint32_t target) const { return static_cast<int32_t>(load() - target) >= 0; }

  // Publishes all that this thread wrote before, and wakes who sleeps here.
  void store(uint32_t value);

  // Wakes the sleepers although the value is unchanged.
  void wake();

  // Whether the value reached the target within the spinning time.
  bool spin(uint32_t target) const;

  // Returns when the value is no longer `seen`, after wake(), after `limit`, or for no reason.
  void sleep(uint32_t seen, std::chrono::milliseconds limit);

 private:
  std::atomic<uint32_t> value_{0};
  // Beside the value on purpose: its owner has the line in its cache whenever it looks here.
  std::atomic<uint32_t> sleepers_{0};
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "counters are shared between processes");

}  // namespace minddp::shm
