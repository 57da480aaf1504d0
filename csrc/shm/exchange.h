// Ticks: how the ranks of a group hand data to each other, step by step.
//
// Each rank has a ring of kSlots slots in its segment. All ranks count the same ticks. In tick t a
// rank fills its slot t % kSlots and posts it; the others await it, read it, and take the tick. A
// slot is filled again only when every peer has taken its last use, so a rank may run up to kSlots
// ticks ahead and no further.
//
// What always holds
//   - The writing and the reading cursor visit ticks 0, 1, 2, … in order, and each tick once.
//   - Every slot carries the call that filled it: its number in this group, what it is and on what. A
//     reader compares it with its own.
//   - In the first tick of a call every rank posts, and awaits all others: so ranks that make different
//     calls all raise, at once, with both calls named.
//   - After a failure the ring is broken for good: each later call raises the first reason.
// Threads: one call at a time, on whichever thread; the caller serializes (work.h).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "group.h"

namespace minddp::shm {

// What all ranks of a call must agree on. Without a dtype it is a barrier, otherwise an all-reduce.
struct Signature {
  at::ScalarType dtype = at::ScalarType::Undefined;
  uint8_t reduce_op = 0;
  uint64_t bytes = 0;

  bool operator==(const Signature&) const = default;
  std::string describe() const;
};

class Exchange {
 public:
  static constexpr uint32_t kSlots = 8;
  static constexpr size_t kSlotBytes = size_t{256} << 10;

  // The area of a segment that the ring takes.
  static constexpr size_t ring_bytes();

  explicit Exchange(Group& group) : group_(group) {}

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }

  // Opens the next call. Throws if the group is broken.
  void begin(const Signature& signature, std::chrono::milliseconds timeout);

  // Writing: the next tick's slot of kSlotBytes, then post().
  char* acquire();
  void post();

  // Reading: what `peer` has in the tick under the reading cursor; take() moves on.
  const char* await(int peer);
  void await_all();
  void take();

  // What `peer` has in the tick being read. REQUIRES: awaited, not yet taken
  const char* data(int peer);

  // Breaks the group with the reason of the exception in flight, told to the peers; rethrows it as
  // c10::DistBackendError with the call named. REQUIRES: called from a catch block
  [[noreturn]] void fail_current();

 private:
  struct alignas(64) Header {
    uint64_t sequence;
    Signature signature;
  };
  static constexpr size_t kStride = sizeof(Header) + kSlotBytes;

  const Header& header(int rank, uint32_t tick);
  Header& own_header(uint32_t tick);
  void check(int peer, const Header& theirs) const;

  Group& group_;
  uint32_t write_tick_ = 0;
  uint32_t read_tick_ = 0;
  uint64_t sequence_ = 0;
  Signature signature_;
  Deadline deadline_{std::chrono::milliseconds(0)};
  std::string broken_;
};

constexpr size_t Exchange::ring_bytes() { return kSlots * kStride; }

}  // namespace minddp::shm
