// Point-to-point messages: buffered sends, receives matched by sender and tag.
//
// A send copies its message into the sender's shared heap and writes an entry into the table that it
// keeps for that receiver; it waits for nobody unless the table is full. A receive takes the oldest
// entry with its tag, so tags may be received in another order than they were sent.
//
// What always holds
//   - Messages of one tag from one sender are received in the order in which they were sent, by the
//     receives in the order in which they were posted.
//   - An entry belongs to the sender while free or taken, to the receiver while full.
// Threads: any; both classes lock themselves.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives.h"
#include "group.h"

namespace minddp::shm {

struct Message;

class Mailbox {
 public:
  static constexpr int kAnySource = -1;

  explicit Mailbox(Group& group);

  // The area that Group::join() reserves for the tables.
  static size_t table_bytes(int size);

  // Throws c10::DistBackendError when the table stays full until the timeout, or the receiver is gone.
  void send(Span message, int to, int tag, std::chrono::milliseconds timeout);

  // Copies the oldest fitting message into `buffer` and returns its sender; -1 when there is none.
  // Throws std::runtime_error when the message has another size.
  int try_receive(Span buffer, int from, int tag);

 private:
  Message* table(int sender, int receiver);
  Message* find_free(int to);
  Message* find_full(int from, int tag);
  void reclaim();
  int receive_from(Span buffer, int from, int tag);

  Group& group_;
  std::mutex send_mutex_;
  std::vector<uint64_t> sent_;  // by receiver; GUARDED_BY(send_mutex_)
};

// The receives that wait for their message.
class Receiver {
 public:
  // Called once, from any thread: the sender's rank, or why there is no message.
  using Done = std::function<void(int from, std::exception_ptr)>;

  Receiver(Group& group, Mailbox& mailbox) : group_(group), mailbox_(mailbox) {}
  ~Receiver() { stop(); }

  void submit(Span buffer, int from, int tag, std::chrono::milliseconds timeout, Done done);

  // Completes what can be completed now.
  void progress();

  // Fails what still waits.
  void stop();

 private:
  struct Request {
    Span buffer;
    int from;
    int tag;
    Deadline deadline;
    Done done;
  };
  struct Outcome {
    Done done;
    int from;
    std::exception_ptr error;
  };

  bool attempt(Request& request, Outcome& outcome);
  std::string why_hopeless(const Request& request);
  void loop();

  Group& group_;
  Mailbox& mailbox_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Request> pending_;  // GUARDED_BY(mutex_)
  bool stopping_ = false;       // GUARDED_BY(mutex_)
  std::thread thread_;          // GUARDED_BY(mutex_)
};

}  // namespace minddp::shm
