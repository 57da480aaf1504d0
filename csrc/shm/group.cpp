#include "group.h"

#include <c10/util/Exception.h>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "exchange.h"

namespace minddp::shm {
namespace {

// How often a sleeping rank looks whether the one that it waits for still lives.
constexpr auto kLifeCheck = std::chrono::milliseconds(50);

uint64_t random_token() {
  std::random_device source;
  return uint64_t{source()} << 32 | source();
}

bool has_exited(int pidfd) {
  pollfd entry{pidfd, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

}  // namespace

size_t Group::segment_bytes() { return round_up(kControlBytes + Exchange::ring_bytes(), kControlBytes); }

std::shared_ptr<Segment> Group::make_segment() {
  auto segment = Segment::create(segment_bytes());
  reinterpret_cast<Control*>(segment->base())->token.store(random_token());
  return segment;
}

Card Group::card_of(const Segment& own) {
  return {::getpid(), own.descriptor(), reinterpret_cast<const Control*>(own.base())->token.load()};
}

Group::Group(std::shared_ptr<Segment> own, int rank, const std::vector<Card>& cards)
    : rank_(rank), peers_(cards.size()) {
  peers_[static_cast<size_t>(rank)].segment = std::move(own);
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank_) attach(peer, cards[static_cast<size_t>(peer)]);
}

void Group::attach(int rank, const Card& card) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.pid = card.pid;
  // Before the memory: a process id may be taken again, the token below shows that it was not.
  peer.pidfd = static_cast<int>(::syscall(SYS_pidfd_open, card.pid, 0));
  if (peer.pidfd < 0)
    throw std::system_error(
        errno, std::generic_category(), c10::str("pidfd_open of rank ", rank, ", process ", card.pid));
  peer.segment = Segment::attach(card.pid, card.descriptor, segment_bytes(), kControlBytes);
  if (control(rank).token.load() != card.token)
    throw std::runtime_error(c10::str("the memory of rank ", rank, " holds another token than it should"));
}

Group::Peer::~Peer() {
  if (pidfd >= 0) ::close(pidfd);
}

Group::~Group() { leave(); }

std::string Group::why_gone(int peer) {
  Control& control = this->control(peer);
  switch (control.state.load(std::memory_order_acquire)) {
    case RankState::kFailed: return c10::str("rank ", peer, " gave up: ", control.failure);
    case RankState::kLeft: return c10::str("rank ", peer, " has left the group (its process group was destroyed)");
    case RankState::kActive: break;
  }
  const Peer& entry = peers_[static_cast<size_t>(peer)];
  return has_exited(entry.pidfd) ? c10::str("rank ", peer, " (process ", entry.pid, ") has died") : "";
}

void Group::await(Counter& counter, uint32_t target, int peer, const Deadline& deadline) {
  if (counter.spin(target)) return;
  while (true) {
    const uint32_t seen = counter.load();
    if (counter.reached(target)) return;
    // Asked before the counter is looked at again: what a rank did before it went away counts.
    const std::string gone = why_gone(peer);
    if (counter.reached(target)) return;
    if (!gone.empty()) throw std::runtime_error(gone);
    if (aborted_.load()) throw std::runtime_error("the process group was aborted or destroyed on this rank");
    const auto left = deadline.left();
    if (left.count() <= 0) {
      throw std::runtime_error(
          c10::str("rank ", peer, " did not take part within the timeout of ", deadline.timeout.count(), " ms"));
    }
    counter.sleep(seen, std::min<std::chrono::milliseconds>(kLifeCheck, left));
  }
}

void Group::fail(const std::string& reason) {
  Control& own = control(rank_);
  if (own.state.load() != RankState::kActive) return;
  std::strncpy(own.failure, reason.c_str(), sizeof(own.failure) - 1);
  announce(RankState::kFailed);
}

void Group::leave() {
  if (control(rank_).state.load() == RankState::kActive) announce(RankState::kLeft);
}

void Group::announce(RankState state) {
  Control& own = control(rank_);
  own.state.store(state, std::memory_order_release);
  own.posted.wake();
  own.taken.wake();
}

}  // namespace minddp::shm
