// All-reduces as asynchronous work: c10d's Work, and the thread that runs one at a time.
//
// Concurrency
//   Works run in the order in which they were submitted, on the queue's one thread. A future's callbacks run there,
//   too, before the next work begins. What they submit themselves (PowerSGD's do, and wait for it) runs at once,
//   inside of that call: so the order is the same on all ranks, however far each rank's main thread has come
//   meanwhile. A callback that waits for a work of the queue runs the queue until then. It cannot wait for such a
//   work's future: that would wait for its own thread. A callback may end the group, and another may wait for who
//   ends it: the thread is not waited for while it runs one. In a forked child no work ends: wait() raises there.
// Lock order: a Work's own mutex after WorkQueue::mutex_.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "owner.h"

namespace minddp::shm {

class WorkQueue;

class ShmWork : public c10d::Work {
 public:
  // `tensors` are the inputs, the value of the future, and the result; they live until the work is gone.
  ShmWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> tensors,
      std::function<void()> program, std::shared_ptr<WorkQueue> queue);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return tensors_; }

  // Runs the program, and publishes its end: wait() returns.
  void run();
  // In the place of run().
  void fail(std::exception_ptr error);
  // Runs the future's callbacks on this thread. REQUIRES: after one of these
  void call_back();

 private:
  const Owner owner_;
  const std::vector<at::Tensor> tensors_;
  std::function<void()> program_;
  const std::shared_ptr<WorkQueue> queue_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class WorkQueue : public std::enable_shared_from_this<WorkQueue> {
 public:
  using Pointer = c10::intrusive_ptr<ShmWork>;

  // Runs the work soon, on the queue's thread; at once, if that is this one.
  void submit(Pointer work);

  // Whether this is the queue's thread: that is, in a callback.
  bool is_here() const;
  // Runs works until this one is complete. REQUIRES: is_here()
  void run_until(ShmWork& awaited);

  // Lets the works end within `patience`, then calls `abort`, which makes the running one fail, and fails the
  // others. On the queue's own thread it waits for nothing. REQUIRES: called before the last reference goes
  void stop(std::chrono::milliseconds patience, const std::function<void()>& abort);

 private:
  using Lock = std::unique_lock<std::mutex>;

  void run(Pointer work, Lock& lock);
  void run_next(Lock& lock);
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Pointer> queue_;  // GUARDED_BY(mutex_)
  bool busy_ = false;          // GUARDED_BY(mutex_); a program or callbacks are being run
  bool in_program_ = false;    // GUARDED_BY(mutex_)
  bool stopping_ = false;      // GUARDED_BY(mutex_)
  std::thread thread_;         // GUARDED_BY(mutex_); begins with the first work
};

}  // namespace minddp::shm
