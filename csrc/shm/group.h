// The ranks of one group: their segments, who is alive, and waiting for one of them.
//
// Life cycle
//   Each rank makes a segment and shows the others a Card of it (minddp/shm/__init__.py gathers them). The
//   constructor maps the segments of all.
//
// What always holds
//   - A segment is a Control block, then the slots of exchange.h.
//   - A rank that gives up says so in its Control block, with the reason, before it raises; whoever waits for it
//   raises
//     too. A rank that dies says nothing; the kernel does (pidfd).
//   - A rank writes to a peer's Control block (Counter), never to its slots.
// Trust: a peer is a process of the same user that holds a segment with the token of its card.
// Threads: after the constructor everything here is constant or atomic.
#pragma once

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

// What a rank shows the others: where its segment can be opened, and what lies there.
struct Card {
  int pid = 0;
  int descriptor = -1;
  uint64_t token = 0;
};

enum class RankState : uint32_t { kActive, kLeft, kFailed };

// The head of each segment, written by its owner.
struct Control {
  std::atomic<uint64_t> token;  // proves that the right memory was mapped
  std::atomic<RankState> state;
  char failure[1024];  // why, once state is kFailed; zero-terminated
  Counter posted;      // ticks whose data lie in this rank's slots (exchange.h)
  Counter taken;       // ticks that this rank has read from all others
};

class Group {
 public:
  // This rank's segment, with a token of its own.
  static std::shared_ptr<Segment> make_segment();
  static Card card_of(const Segment& own);

  // Maps the segments of all; cards by rank. Throws std::exception that says whose it cannot map, and why.
  Group(std::shared_ptr<Segment> own, int rank, const std::vector<Card>& cards);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

  Control& control(int rank) { return *reinterpret_cast<Control*>(base(rank)); }
  const char* slots(int rank) { return base(rank) + kControlBytes; }
  char* own_slots() { return base(rank_) + kControlBytes; }

  // Returns once `counter`, which `peer` raises, has reached `target`. Throws std::runtime_error that
  // says why it never will: the peer died, left, failed, did not come in time; or abort() was called.
  void await(Counter& counter, uint32_t target, int peer, const Deadline& deadline);

  // Tells the others. The first reason stays.
  void fail(const std::string& reason);
  void leave();

  // Makes every await() of this process throw, now and later.
  void abort() { aborted_.store(true); }

 private:
  struct Peer {
    int pid = 0;
    int pidfd = -1;
    std::shared_ptr<Segment> segment;
    ~Peer();
  };

  static constexpr size_t kControlBytes = 4096;  // a page: mprotect() tells pages apart
  static_assert(sizeof(Control) <= kControlBytes);

  static size_t segment_bytes();
  char* base(int rank) const { return peers_[static_cast<size_t>(rank)].segment->base(); }
  void attach(int rank, const Card& card);
  std::string why_gone(int peer);
  void announce(RankState state);

  const int rank_;
  std::vector<Peer> peers_;  // by rank; includes the own one
  std::atomic<bool> aborted_{false};
};

}  // namespace minddp::shm
