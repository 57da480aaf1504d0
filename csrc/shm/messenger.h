// The messages on their way: sends for which the receiver's table has no room, receives whose message
// has not come. Each is tried at once, and then by a thread that sleeps until a peer rings this rank's bell.
//
// What always holds
//   - Messages to one rank leave in the order in which they were sent; a receive is served after the
//     earlier ones that the same message would fit.
//   - Every send and receive ends: done, with what it waits for gone, at its timeout, or at stop().
//   - No callback runs with a lock held; one may stop the messenger, and drop the last reference to it.
// Threads: any.
// Lock order: Requests::mutex, then nothing; mutex_, then nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "group.h"
#include "mailbox.h"

namespace minddp::shm {

class Messenger : public std::enable_shared_from_this<Messenger> {
 public:
  // Called once, from any thread: the peer's rank, or what went wrong.
  using Done = std::function<void(int peer, std::exception_ptr)>;

  explicit Messenger(std::shared_ptr<Group> group) : group_(std::move(group)), mailbox_(*group_) {}

  // The memory is the caller's until `done`.
  void send(Span message, int to, int tag, std::chrono::milliseconds timeout, Done done);
  void receive(Span buffer, int from, int tag, std::chrono::milliseconds timeout, Done done);

  // Completes what can be completed now.
  void progress();

  // Gives what is still to be sent until `patience` to leave, then fails what still waits.
  void stop(std::chrono::milliseconds patience);

 private:
  struct Request {
    bool sends;
    Span memory;
    int peer;
    int tag;
    Deadline deadline;
    Done done;
  };
  struct Requests {
    std::mutex mutex;
    std::list<Request> list;      // GUARDED_BY(mutex); oldest first
    std::atomic<size_t> size{0};  // of the list
  };
  struct Outcome {
    Done done;
    int peer;
    std::exception_ptr error;
  };

  void submit(Requests& requests, Request request);
  void progress(Requests& requests);
  bool attempt(Request& request, Outcome& outcome);
  std::string why_hopeless(const Request& request);
  bool waiting() const { return sends_.size > 0 || receives_.size > 0; }
  void loop();

  const std::shared_ptr<Group> group_;
  Mailbox mailbox_;
  Requests sends_;
  Requests receives_;
  std::atomic<size_t> callbacks_{0};  // being run, or about to be
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable changed_;  // with mutex_: waiting() or stopping_ has become true
  std::thread thread_;               // GUARDED_BY(mutex_)
};

}  // namespace minddp::shm
