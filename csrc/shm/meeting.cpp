#include "meeting.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <sstream>
#include <thread>

namespace minddp::shm {
namespace {

// minddp/shm/__init__.py writes to the same keys where the extension itself cannot be loaded.
const std::string kPrefix = "minddp-shm/";
const std::string kEvents = kPrefix + "events";  // counts what changed: cards, failures
const std::string kFailed = kPrefix + "failed";  // of the last rank that did: attempt, rank, reason

constexpr int64_t kNoEvent = -1;
constexpr auto kShortestPause = std::chrono::milliseconds(1);
constexpr auto kLongestPause = std::chrono::milliseconds(50);
constexpr int kWaitPerPause = 8;

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string to_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// FNV-1a. It need not resist anybody: who can write to the store can also make the meeting fail.
std::string digest(const std::vector<std::string>& texts) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const std::string& text : texts)
    for (const char character : text + '\0') hash = (hash ^ static_cast<uint8_t>(character)) * 0x100000001b3u;
  std::ostringstream out;
  out << std::hex << hash;
  return out.str();
}

}  // namespace

Meeting::Meeting(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout)
    : store_(store), rank_(rank), size_(size), deadline_(timeout), attempt_(store.add(key("attempt", rank), 1)) {}

std::vector<std::string> Meeting::agree(const std::string& card) {
  store_.set(key("card", rank_), to_bytes(card));
  store_.add(kEvents, 1);
  while (true) {
    const int64_t event = events();  // before the cards: a later one counts further
    await_all("card", kNoEvent);
    const std::vector<std::string> cards = read_all("card");
    if (cards[static_cast<size_t>(rank_)] != card)
      C10_THROW_ERROR(DistBackendError, c10::str("shm: another process joins this group as rank ", rank_, ", too"));
    round_ = digest(cards);
    store_.set(key("agreed", rank_), to_bytes("yes"));
    if (await_all("agreed", event)) return cards;
  }
}

std::vector<std::string> Meeting::gather(const std::string& what, const std::string& mine) {
  store_.set(key(what, rank_), to_bytes(mine));
  await_all(what, kNoEvent);
  return read_all(what);
}

void Meeting::fail(const std::string& reason) noexcept {
  try {
    store_.set(kFailed, to_bytes(c10::str(attempt_, ' ', rank_, ' ', reason)));
    store_.add(kEvents, 1);
  } catch (const std::exception&) {
    // The store is gone; the others will see that themselves.
  }
}

std::string Meeting::key(const std::string& what, int rank) const {
  return kPrefix + (round_.empty() || what == "card" ? "" : round_ + "/") + what + "/" + std::to_string(rank);
}

std::vector<std::string> Meeting::keys(const std::string& what) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(key(what, rank));
  return keys;
}

std::vector<std::string> Meeting::read_all(const std::string& what) {
  std::vector<std::string> values;
  for (const std::string& key : keys(what)) values.push_back(to_text(store_.get(key)));
  return values;
}

int64_t Meeting::events() { return store_.add(kEvents, 0); }

// Waits until all ranks have set the key; false when more happens in the store than `until_event` before.
bool Meeting::await_all(const std::string& what, int64_t until_event) {
  const std::vector<std::string> awaited = keys(what);
  const auto begin = std::chrono::steady_clock::now();
  while (!store_.check(awaited)) {
    const int64_t event = events();
    if (event != seen_event_) raise_if_one_failed();
    seen_event_ = event;
    if (until_event != kNoEvent && event != until_event) return false;
    if (deadline_.left().count() <= 0) raise_timeout(what);
    const auto waited =
        std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
    const auto pause = std::clamp<std::chrono::milliseconds>(waited / kWaitPerPause, kShortestPause, kLongestPause);
    std::this_thread::sleep_for(std::min(pause, deadline_.left()));
  }
  return true;
}

void Meeting::raise_if_one_failed() {
  if (!store_.check({kFailed})) return;
  std::istringstream note(to_text(store_.get(kFailed)));
  int64_t attempt = 0;
  int rank = -1;
  note >> attempt >> rank;
  if (!note || attempt < attempt_ || rank == rank_) return;
  std::string reason;
  std::getline(note >> std::ws, reason, '\0');
  C10_THROW_ERROR(DistBackendError, c10::str("shm: rank ", rank, " could not join the group: ", reason));
}

void Meeting::raise_timeout(const std::string& what) {
  int missing = 0;
  while (missing + 1 < size_ && store_.check({key(what, missing)})) ++missing;
  C10_THROW_ERROR(DistBackendError,
      c10::str("shm: rank ", missing, " did not come to join the group within ", deadline_.timeout.count(),
          " ms, rank ", rank_, " waited for it"));
}

}  // namespace minddp::shm
