// Point-to-point messages: buffered sends, receives matched by sender and tag.
//
// A send copies its message into the sender's shared heap and writes an entry into the table that it
// keeps for that receiver. A receive takes the oldest entry with its tag, so tags may be received in
// another order than they were sent. The sender waits for nobody: while the table is full, its messages
// wait in its own memory (messenger.h).
//
// What always holds
//   - Messages of one tag from one sender are received in the order in which they were sent.
//   - An entry belongs to the sender while free or taken, to the receiver while full.
// Threads: any for either half; each half locks itself or is called under a lock (messenger.h).
#pragma once

#include <mutex>
#include <vector>

#include "collectives.h"
#include "group.h"

namespace minddp::shm {

struct Message;

class Mailbox {
 public:
  static constexpr int kAnySource = -1;

  // Messages from one rank to another that may lie unreceived in the table.
  static constexpr int kEntries = 64;

  explicit Mailbox(Group& group);

  // The area that Group::join() reserves for the tables.
  static size_t table_bytes(int size);

  // Whether there was room for the message. Throws OutOfSharedMemory. REQUIRES: one thread at a time
  bool try_send(Span message, int to, int tag);

  // Copies the oldest fitting message into `buffer` and returns its sender; -1 when there is none.
  // Throws std::runtime_error when the message has another size. REQUIRES: one thread at a time
  int try_receive(Span buffer, int from, int tag);

 private:
  Message* table(int sender, int receiver);
  Message* find_free(int to);
  Message* find_full(int from, int tag);
  void reclaim();
  int receive_from(Span buffer, int from, int tag);

  Group& group_;
  std::vector<uint64_t> sent_;  // by receiver
};

}  // namespace minddp::shm
