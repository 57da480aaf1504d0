#include "mailbox.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace minddp::shm {
namespace {

// Messages from one rank to another that may lie unreceived before send() waits.
constexpr int kEntries = 64;

constexpr auto kReceiverSleep = std::chrono::milliseconds(50);

std::exception_ptr make_error(const std::string& text) {
  try {
    C10_THROW_ERROR(DistBackendError, "shm: " + text);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

enum class MessageState : uint32_t { kFree, kFull, kTaken };

// Lies in the sender's segment.
struct alignas(64) Message {
  std::atomic<MessageState> state;
  int32_t tag;
  uint64_t number;  // counts the messages of this sender to this receiver
  int64_t offset;   // into the sender's segment; meaningless when bytes is 0
  uint64_t bytes;
};

Mailbox::Mailbox(Group& group) : group_(group), sent_(static_cast<size_t>(group.size())) {}

size_t Mailbox::table_bytes(int size) { return sizeof(Message) * kEntries * static_cast<size_t>(size); }

Message* Mailbox::table(int sender, int receiver) {
  return reinterpret_cast<Message*>(group_.tables(sender)) + receiver * kEntries;
}

// Frees what the receivers have taken.
void Mailbox::reclaim() {
  for (int receiver = 0; receiver < group_.size(); ++receiver) {
    Message* messages = table(group_.rank(), receiver);
    for (int i = 0; i < kEntries; ++i) {
      Message& message = messages[i];
      if (message.state.load(std::memory_order_acquire) != MessageState::kTaken) continue;
      if (message.bytes > 0) group_.heap().free(group_.at(group_.rank(), message.offset));
      message.state.store(MessageState::kFree, std::memory_order_relaxed);
    }
  }
}

Message* Mailbox::find_free(int to) {
  Message* messages = table(group_.rank(), to);
  for (int i = 0; i < kEntries; ++i)
    if (messages[i].state.load(std::memory_order_relaxed) == MessageState::kFree) return &messages[i];
  return nullptr;
}

void Mailbox::send(Span message, int to, int tag, std::chrono::milliseconds timeout) {
  const Deadline deadline(timeout);
  std::lock_guard<std::mutex> lock(send_mutex_);
  Message* entry = nullptr;
  Counter& bell = group_.control(group_.rank()).bell;
  while (entry == nullptr) {
    const uint32_t seen = bell.load();
    reclaim();
    entry = find_free(to);
    if (entry != nullptr) break;
    try {
      group_.await(bell, seen + 1, to, deadline);
    } catch (const std::exception& error) {
      C10_THROW_ERROR(DistBackendError,
          c10::str("shm: send to rank ", to, " with ", kEntries, " messages unreceived there: ", error.what()));
    }
  }
  entry->tag = tag;
  entry->number = sent_[static_cast<size_t>(to)]++;
  entry->bytes = message.bytes;
  entry->offset = 0;
  if (message.bytes > 0) {
    char* buffer = group_.heap().allocate(message.bytes);
    std::memcpy(buffer, message.data, message.bytes);
    entry->offset = group_.offset_of(buffer, message.bytes);
  }
  entry->state.store(MessageState::kFull, std::memory_order_release);
  group_.control(to).bell.ring();
}

int Mailbox::try_receive(Span buffer, int from, int tag) {
  if (from != kAnySource) return receive_from(buffer, from, tag);
  for (int sender = 0; sender < group_.size(); ++sender)
    if (receive_from(buffer, sender, tag) >= 0) return sender;
  return -1;
}

// The entry with the lowest number among those that a single scan sees.
Message* Mailbox::find_full(int from, int tag) {
  Message* messages = table(from, group_.rank());
  Message* oldest = nullptr;
  for (int i = 0; i < kEntries; ++i) {
    Message& message = messages[i];
    if (message.state.load(std::memory_order_acquire) == MessageState::kFull && message.tag == tag &&
        (oldest == nullptr || message.number < oldest->number)) {
      oldest = &message;
    }
  }
  return oldest;
}

int Mailbox::receive_from(Span buffer, int from, int tag) {
  // Twice: a message may be written behind the scan's back and a later one ahead of it. Whatever is
  // older than a message that was seen is there for the second scan.
  if (find_full(from, tag) == nullptr) return -1;
  Message* oldest = find_full(from, tag);
  const uint64_t bytes = oldest->bytes;
  if (bytes == buffer.bytes && bytes > 0) std::memcpy(buffer.data, group_.at(from, oldest->offset), bytes);
  oldest->state.store(MessageState::kTaken, std::memory_order_release);
  group_.control(from).bell.ring();
  if (bytes != buffer.bytes) {
    throw std::runtime_error(c10::str("rank ", from, " sent ", bytes, " bytes with tag ", tag,
        ", but the tensor that receives them on rank ", group_.rank(), " has ", buffer.bytes));
  }
  return from;
}

void Receiver::submit(Span buffer, int from, int tag, std::chrono::milliseconds timeout, Done done) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.push_back({buffer, from, tag, Deadline(timeout), std::move(done)});
  }
  progress();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!pending_.empty() && !stopping_) {
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
    changed_.notify_one();
  }
}

void Receiver::progress() {
  std::vector<Outcome> outcomes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A message that comes while this goes through the list belongs to the first request that fits it,
    // even if that was already passed by.
    std::vector<const Request*> waiting;
    for (auto it = pending_.begin(); it != pending_.end();) {
      const auto competes = [&](const Request* earlier) {
        return earlier->tag == it->tag &&
            (earlier->from == it->from || earlier->from == Mailbox::kAnySource || it->from == Mailbox::kAnySource);
      };
      Outcome outcome;
      if (std::none_of(waiting.begin(), waiting.end(), competes) && attempt(*it, outcome)) {
        outcomes.push_back(std::move(outcome));
        it = pending_.erase(it);
      } else {
        waiting.push_back(&*it++);
      }
    }
  }
  for (Outcome& outcome : outcomes) outcome.done(outcome.from, outcome.error);
}

// Whether the request has ended, and how.
bool Receiver::attempt(Request& request, Outcome& outcome) {
  // Asked first: what a rank sent before it went away is still received.
  const std::string hopeless = why_hopeless(request);
  std::string error;
  int from = -1;
  try {
    from = mailbox_.try_receive(request.buffer, request.from, request.tag);
    error = from < 0 ? hopeless : "";
  } catch (const std::exception& mismatch) {
    error = mismatch.what();
  }
  if (from < 0 && error.empty()) return false;
  outcome = {std::move(request.done), from, error.empty() ? nullptr : make_error(error)};
  return true;
}

std::string Receiver::why_hopeless(const Request& request) {
  std::string gone;
  if (request.from != Mailbox::kAnySource && request.from != group_.rank()) gone = group_.why_gone(request.from);
  if (gone.empty() && stopping_) gone = "the process group was aborted or destroyed on this rank";
  if (gone.empty() && request.deadline.left().count() <= 0)
    gone = c10::str("nothing came within ", request.deadline.timeout.count(), " ms");
  if (gone.empty()) return "";
  const std::string from = request.from == Mailbox::kAnySource ? "any rank" : "rank " + std::to_string(request.from);
  return c10::str("rank ", group_.rank(), " receives from ", from, " with tag ", request.tag, ": ", gone);
}

void Receiver::loop() {
  Counter& bell = group_.control(group_.rank()).bell;
  while (true) {
    const uint32_t seen = bell.load();
    progress();
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopping_) return;
    if (pending_.empty()) {
      changed_.wait(lock, [this] { return stopping_ || !pending_.empty(); });
      continue;
    }
    lock.unlock();
    bell.sleep(seen, kReceiverSleep);
  }
}

void Receiver::stop() {
  std::thread thread;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    thread.swap(thread_);
  }
  changed_.notify_all();
  group_.control(group_.rank()).bell.ring();
  if (thread.joinable()) thread.join();
  progress();
}

}  // namespace minddp::shm
