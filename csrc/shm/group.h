// The ranks of one group: their segments, who is alive, and waiting for one of them.
//
// Life cycle
//   join() meets the other ranks in the store: each publishes its host, process and segment, each
//   maps the segments of all, and all learn whether everyone succeeded. If one did not, every rank
//   raises. Afterwards the store is not used again; a later group may use it.
//
// What always holds
//   - A segment is a Control block, the mailboxes' tables, the slots of exchange.h, then a heap.
//   - A rank that gives up says so in its Control block, with the reason, before it raises; whoever
//     waits for it raises too. A rank that dies says nothing; the kernel does (pidfd).
//   - A rank writes to a peer's Control block and tables, never to its slots or heap.
// Trust: a peer is a process of the same user that holds a segment with the token of its card. What it
// writes where others read is checked as far as memory goes: no offset of its reaches past its segment.
// Threads: after join() everything here is constant or atomic.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "counter.h"
#include "deadline.h"
#include "segment.h"

namespace minddp::shm {

class Meeting;

enum class RankState : uint32_t { kActive, kLeft, kFailed };

// The head of each segment. Written by its owner, except for the bell.
struct Control {
  std::atomic<uint64_t> token;  // proves that the right memory was mapped
  std::atomic<RankState> state;
  char failure[1024];  // why, once state is kFailed; zero-terminated
  Counter posted;      // ticks whose data lie in this rank's slots (exchange.h)
  Counter taken;       // ticks that this rank has read from all others
  Counter bell;        // rung by a peer when a mailbox of this rank changes (mailbox.h)
};

class Group {
 public:
  // Collective over the store's ranks. `table_bytes` and `slot_bytes` are the sizes of the areas
  // between the Control block and the heap. Throws c10::DistBackendError on every rank when one of
  // them is on another machine, cannot map another's memory, or does not arrive in time.
  static std::shared_ptr<Group> join(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout,
      size_t table_bytes, size_t slot_bytes);

  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  SharedHeap& heap() { return *heap_; }
  std::shared_ptr<SharedHeap> shared_heap() { return heap_; }

  Control& control(int rank) { return *reinterpret_cast<Control*>(base(rank)); }
  char* tables(int rank) { return base(rank) + kControlBytes; }
  const char* slots(int rank) { return base(rank) + slots_begin_; }
  char* own_slots() { return base(rank_) + slots_begin_; }

  // Where `rank` has what lies `offset` bytes into its segment. Throws std::runtime_error when that is
  // not within its heap.
  const char* at(int rank, int64_t offset, size_t bytes) const;
  char* own_at(int64_t offset) { return base(rank_) + offset; }
  // The offset of memory within the own segment's heap; -1 when it does not lie there.
  int64_t offset_of(const void* address, size_t bytes) const;

  // Returns once `counter`, which `peer` raises, has reached `target`. Throws std::runtime_error that
  // says why it never will: the peer died, left, failed, did not come in time; or abort() was called.
  void await(Counter& counter, uint32_t target, int peer, const Deadline& deadline);

  // Why nothing more is to be expected from `peer`; empty while it is active.
  std::string why_gone(int peer);

  // Throws std::runtime_error when a peer has failed or left. Otherwise what this thread has read from
  // the peers' heaps before is what they held while they took part.
  void check_all_active();

  // Tells the others. The first reason stays.
  void fail(const std::string& reason);
  void leave();

  // Makes every await() of this process throw, now and later.
  void abort() { aborted_.store(true); }
  bool aborted() const { return aborted_.load(); }

 private:
  struct Peer {
    int64_t pid = 0;
    int pidfd = -1;
    std::shared_ptr<Segment> segment;
  };

  template <class T, class... Arguments>
  friend std::shared_ptr<T> make_owned(Arguments&&... arguments);

  static constexpr size_t kPage = 4096;
  static constexpr size_t kControlBytes = kPage;
  static_assert(sizeof(Control) <= kControlBytes);

  Group(int rank, int size, size_t table_bytes, size_t slot_bytes);

  void meet(Meeting& meeting);
  char* base(int rank) const { return peers_[static_cast<size_t>(rank)].segment->base(); }
  void attach_all(const std::vector<std::string>& cards);
  void attach(int rank, const std::string& card);
  void announce(RankState state);

  const int rank_;
  const int size_;
  const size_t slots_begin_;  // all before it may be written to by peers
  const size_t heap_begin_;
  std::vector<Peer> peers_;  // by rank; includes the own one
  std::shared_ptr<SharedHeap> heap_;
  std::atomic<bool> aborted_{false};
};

}  // namespace minddp::shm
