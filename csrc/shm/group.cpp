#include "group.h"

#include <c10/util/Exception.h>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <cstdint>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include "meeting.h"

namespace minddp::shm {
namespace {

// How often a sleeping rank looks whether the one that it waits for still lives.
constexpr auto kLifeCheck = std::chrono::milliseconds(50);

// What a rank publishes for the others.
struct Card {
  std::string host;  // equal on ranks that can share memory
  std::string name;  // for messages
  int64_t pid = 0;
  int descriptor = -1;
  size_t bytes = 0;
  uint64_t token = 0;

  std::string serialize() const {
    std::ostringstream out;
    out << host << '\n' << name << '\n' << pid << ' ' << descriptor << ' ' << bytes << ' ' << token;
    return out.str();
  }

  static Card parse(int rank, const std::string& text) {
    std::istringstream in(text);
    Card card;
    std::getline(in, card.host);
    std::getline(in, card.name);
    in >> card.pid >> card.descriptor >> card.bytes >> card.token;
    if (!in || card.pid <= 0 || card.pid > INT32_MAX || card.descriptor < 0)
      throw std::runtime_error(c10::str("what the store holds for rank ", rank, " is not a card of minddp's shm"));
    return card;
  }
};

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string link_target(const char* path) {
  char target[256] = {};
  return ::readlink(path, target, sizeof(target) - 1) > 0 ? target : "";
}

// Two processes can open each other's memory when they run under one kernel, which draws a boot id
// when it starts, and see each other's process ids. MINDDP_SHM_HOST_ID tells apart what these do not.
std::string host_id() {
  const char* extra = std::getenv("MINDDP_SHM_HOST_ID");
  return first_line("/proc/sys/kernel/random/boot_id") + " " + link_target("/proc/self/ns/pid") + " " +
      (extra == nullptr ? "" : extra);
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

uint64_t random_token() {
  std::random_device source;
  return (uint64_t{source()} << 32 | source()) | 1;
}

int open_pidfd(int64_t pid) { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); }

bool has_exited(int pidfd) {
  pollfd entry{pidfd, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

void check_hosts(const std::vector<std::string>& cards) {
  std::vector<std::pair<std::string, std::string>> hosts;  // host, "name has ranks 0 1", by the first of these
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    const Card card = Card::parse(static_cast<int>(rank), cards[rank]);
    auto found = std::find_if(hosts.begin(), hosts.end(), [&](const auto& host) { return host.first == card.host; });
    if (found == hosts.end()) found = hosts.insert(hosts.end(), {card.host, card.name + " has ranks"});
    found->second += " " + std::to_string(rank);
  }
  if (hosts.size() == 1) return;
  std::string text;
  for (const auto& [host, ranks] : hosts) text.append(text.empty() ? "" : "; ").append(ranks);
  C10_THROW_ERROR(DistBackendError,
      "shm: the ranks of a group must share one machine and one PID namespace (containers: --pid=host), "
      "but these do not: " +
          text + ". Use backend='gloo' across machines, and 'shm' for groups within one.");
}

void check_everyone_attached(const std::vector<std::string>& failures) {
  std::string text;
  for (size_t rank = 0; rank < failures.size(); ++rank)
    if (!failures[rank].empty()) text += "; rank " + std::to_string(rank) + ": " + failures[rank];
  if (!text.empty()) {
    C10_THROW_ERROR(DistBackendError,
        "shm: the ranks could not map each other's memory (they must run as the same user, and /proc must be "
        "readable)" +
            text + ". Use backend='gloo' where this cannot be arranged.");
  }
}

}  // namespace

Group::Group(int rank, int size, size_t table_bytes, size_t slot_bytes)
    : rank_(rank), size_(size), slots_begin_((kControlBytes + table_bytes + kPage - 1) / kPage * kPage),
      heap_begin_(slots_begin_ + slot_bytes), peers_(static_cast<size_t>(size)) {
  const std::shared_ptr<Segment> segment = Segment::create(segment_bytes(size) + heap_begin_);
  peers_[static_cast<size_t>(rank)].segment = segment;
  heap_ = make_owned<SharedHeap>(segment, heap_begin_);
}

std::shared_ptr<Group> Group::join(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout,
    size_t table_bytes, size_t slot_bytes) {
  Meeting meeting(store, rank, size, timeout);
  try {
    const auto group = make_owned<Group>(rank, size, table_bytes, slot_bytes);
    group->meet(meeting);
    return group;
  } catch (const c10::Error& error) {
    meeting.fail(error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    meeting.fail(error.what());
    C10_THROW_ERROR(DistBackendError, c10::str("shm: rank ", rank, " could not join the group: ", error.what()));
  }
}

void Group::meet(Meeting& meeting) {
  Segment& own = *peers_[static_cast<size_t>(rank_)].segment;
  const Card card{host_id(), host_name(), ::getpid(), own.descriptor(), own.bytes(), random_token()};
  control(rank_).token.store(card.token);
  const auto cards = meeting.agree(card.serialize());
  check_hosts(cards);
  std::string failure;
  try {
    attach_all(cards);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  check_everyone_attached(meeting.gather("attached", failure));
}

void Group::attach_all(const std::vector<std::string>& cards) {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) attach(peer, cards[static_cast<size_t>(peer)]);
}

void Group::attach(int rank, const std::string& text) {
  const Card card = Card::parse(rank, text);
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.pid = card.pid;
  // Before the memory: a process id may be taken again, the token below shows that it was not.
  peer.pidfd = open_pidfd(card.pid);
  if (peer.pidfd < 0)
    throw std::system_error(errno, std::generic_category(), "pidfd_open of process " + std::to_string(card.pid));
  if (card.bytes != peers_[static_cast<size_t>(rank_)].segment->bytes())
    throw std::runtime_error(c10::str("rank ", rank, " has a segment of another size, ", card.bytes, " bytes"));
  peer.segment = Segment::attach(static_cast<pid_t>(card.pid), card.descriptor, card.bytes, slots_begin_);
  if (control(rank).token.load() != card.token)
    throw std::runtime_error("the memory of rank " + std::to_string(rank) + " holds another token than it should");
}

Group::~Group() {
  leave();
  for (const Peer& peer : peers_)
    if (peer.pidfd >= 0) ::close(peer.pidfd);
}

int64_t Group::offset_of(const void* address, size_t bytes) const {
  const Segment& own = *peers_[static_cast<size_t>(rank_)].segment;
  return own.contains(address, bytes) ? static_cast<const char*>(address) - own.base() : -1;
}

const char* Group::at(int rank, int64_t offset, size_t bytes) const {
  const size_t first = static_cast<size_t>(offset);
  const size_t end = peers_[static_cast<size_t>(rank)].segment->bytes();
  if (first < heap_begin_ || first > end || bytes > end - first)
    throw std::runtime_error(c10::str("rank ", rank, " names memory outside its segment"));
  return base(rank) + first;
}

std::string Group::why_gone(int peer) {
  Control& control = this->control(peer);
  switch (control.state.load(std::memory_order_acquire)) {
    case RankState::kFailed: return c10::str("rank ", peer, " gave up: ", control.failure);
    case RankState::kLeft: return c10::str("rank ", peer, " has left the group (its process group was destroyed)");
    case RankState::kActive: break;
  }
  const Peer& entry = peers_[static_cast<size_t>(peer)];
  if (entry.pidfd >= 0 && has_exited(entry.pidfd))
    return c10::str("rank ", peer, " (process ", entry.pid, ") has died");
  return "";
}

void Group::check_all_active() {
  // What was read may have been written by what a peer does next only if this sees why.
  std::atomic_thread_fence(std::memory_order_acquire);
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && control(peer).state.load(std::memory_order_acquire) != RankState::kActive)
      throw std::runtime_error(why_gone(peer));
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
    if (aborted()) throw std::runtime_error("the process group was aborted or destroyed on this rank");
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
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && peers_[static_cast<size_t>(peer)].segment != nullptr) control(peer).bell.ring();
}

}  // namespace minddp::shm
