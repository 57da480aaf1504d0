// How the ranks of a group meet in the store.
//
// Each publishes a card; all agree on one set of cards; then they may gather what else they have to say.
//
// What always holds
//   - The cards that agree() returns are the same on all ranks, and each is of a rank that takes part
//     now: what earlier groups left in the same store is not mistaken for it. Every card differs from
//     every other that was ever published (it holds a random number), a rank shows under a key made of
//     the whole set that it has seen this set, and goes on once it finds that all have.
//   - A rank that fails says so before it raises; who waits in the store raises with its words at once.
//     A failure is told with the number of the attempt on this store, so one of an earlier attempt is
//     not heard again.
//   - What comes from the store is text. It is compared and parsed, never executed or unpickled.
// Requests: two at a time while a rank waits, at intervals that grow with the wait, however many ranks.
// Threads: one.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

#include "deadline.h"

namespace minddp::shm {

class Meeting {
 public:
  Meeting(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout);

  // Collective: everyone's card, by rank. Throws c10::DistBackendError when a rank fails or does not come.
  // REQUIRES: the card was never published before
  std::vector<std::string> agree(const std::string& card);

  // Collective, after agree(): everyone's `mine`, by rank. Throws as agree() does.
  std::vector<std::string> gather(const std::string& what, const std::string& mine);

  // Tells the others that this rank does not come, and why.
  void fail(const std::string& reason) noexcept;

 private:
  bool await_all(const std::string& what, int64_t until_event);
  std::vector<std::string> read_all(const std::string& what);
  std::string key(const std::string& what, int rank) const;
  std::vector<std::string> keys(const std::string& what) const;
  int64_t events();
  void raise_if_one_failed();
  [[noreturn]] void raise_timeout(const std::string& what);

  c10d::Store& store_;
  const int rank_;
  const int size_;
  const Deadline deadline_;
  std::string round_;  // a digest of the cards agreed on
  int64_t attempt_;    // counts this rank's meetings in this store
  int64_t seen_event_ = -1;
};

}  // namespace minddp::shm
