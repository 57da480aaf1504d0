#include "mailbox.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace minddp::shm {

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
      if (message.bytes > 0) group_.heap().free(group_.own_at(message.offset));
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

bool Mailbox::try_send(Span message, int to, int tag) {
  reclaim();
  Message* entry = find_free(to);
  if (entry == nullptr) return false;
  entry->offset = 0;
  if (message.bytes > 0) {
    char* buffer = group_.heap().allocate(message.bytes);
    std::memcpy(buffer, message.data, message.bytes);
    entry->offset = group_.offset_of(buffer, message.bytes);
  }
  entry->tag = tag;
  entry->number = sent_[static_cast<size_t>(to)]++;
  entry->bytes = message.bytes;
  entry->state.store(MessageState::kFull, std::memory_order_release);
  group_.control(to).bell.ring();
  return true;
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
  if (bytes == buffer.bytes && bytes > 0) std::memcpy(buffer.data, group_.at(from, oldest->offset, bytes), bytes);
  oldest->state.store(MessageState::kTaken, std::memory_order_release);
  group_.control(from).bell.ring();
  if (bytes != buffer.bytes) {
    throw std::runtime_error(c10::str("rank ", from, " sent ", bytes, " bytes with tag ", tag,
        ", but the tensor that receives them on rank ", group_.rank(), " has ", buffer.bytes));
  }
  return from;
}

}  // namespace minddp::shm
