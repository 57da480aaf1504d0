// Ticks: how the ranks of a group hand data to each other, step by step.
//
// Each rank has a ring of kSlots slots in its segment. All ranks count the same ticks. In tick t a
// rank may fill its slot t % kSlots and post it; the others await it, read it, and take the tick. A
// slot is filled again only when every peer has taken its last use, so a rank may run up to kSlots
// ticks ahead and no further. Every collective is a program of ticks (collectives.cpp), and moves
// both cursors by the same number on every rank, whatever its part was.
//
// What always holds
//   - The writing and the reading cursor visit ticks 0, 1, 2, … in order, and each tick once.
//   - Every slot carries the call that filled it: its number in this group, what it is and on what. A
//     reader compares it with its own.
//   - In the first tick of a collective every rank posts, with data or without, and awaits all others:
//     so ranks that make different calls all raise, at once, with both calls named.
//   - After a failure the ring is broken for good: each later collective raises the first reason.
// Threads: one collective at a time, on whichever thread; the caller serializes (work.h).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "group.h"

namespace minddp::shm {

enum class Kind : uint8_t {
  kNone,
  kBarrier,
  kBroadcast,
  kAllreduce,
  kReduce,
  kAllgather,
  kGather,
  kScatter,
  kReduceScatter,
  kAlltoall,
};

// What all ranks of a collective must agree on. `bytes` is 0 where ranks may differ.
struct Signature {
  Kind kind = Kind::kNone;
  at::ScalarType dtype = at::ScalarType::Undefined;
  uint8_t reduce_op = kNoReduction;
  int32_t root = -1;
  uint64_t bytes = 0;

  static constexpr uint8_t kNoReduction = 255;
  bool operator==(const Signature&) const = default;
  std::string describe() const;
};

class Exchange {
 public:
  static constexpr uint32_t kSlots = 8;
  static constexpr size_t kSlotBytes = size_t{256} << 10;

  // The area that Group::join() reserves for the ring.
  static constexpr size_t ring_bytes();

  explicit Exchange(Group& group) : group_(group) {}

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  Group& group() { return group_; }

  // Opens the next collective. Throws when the group is broken.
  void begin(const Signature& signature, std::chrono::milliseconds timeout);

  // Writing: the next tick's slot of kSlotBytes, then post() or nothing to be read, skip().
  // `note` travels with the slot: a number that readers see.
  char* acquire();
  void post(int64_t note = 0);
  void skip();

  // Reading: what `peer` has in the tick under the reading cursor; take() moves on.
  const char* await(int peer);
  void await_all();
  void take();

  // What `peer` has in the tick being read. REQUIRES: awaited, not yet taken
  const char* data(int peer);
  int64_t note(int peer);

  // Counts the collectives of this group.
  uint64_t sequence() const { return sequence_; }

  // Breaks the group with the reason of the exception in flight, told to the peers; rethrows it as
  // c10::DistBackendError with the collective named. REQUIRES: called from a catch block
  [[noreturn]] void fail_current();

 private:
  struct alignas(64) Header {
    uint32_t tick;
    uint64_t sequence;
    Signature signature;
    int64_t note;
  };
  static constexpr size_t kStride = sizeof(Header) + kSlotBytes;

  const Header& header(int rank, uint32_t tick);
  Header& own_header(uint32_t tick);
  void check(int peer, const Header& theirs) const;
  std::string describe() const;

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
