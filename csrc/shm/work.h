// Collectives as asynchronous work: c10d's Work, and the queue that runs one at a time.
//
// Concurrency
//   Works run in the order in which they were submitted, one at a time: on a worker thread, or on a
//   thread that waits for one of them, if it finds the queue idle: a caller that would block anyway
//   saves two thread switches, which cost more than a small collective.
//   A future's callbacks run on the thread that ran the work, before the next work begins. What they
//   submit themselves (PowerSGD's do, and wait for it) runs at once, ahead of the queue: so the order of
//   collectives is the same on all ranks, however far each rank's main thread has come meanwhile. That is
//   why another worker is started when the others are busy with callbacks.
//   A callback may end the group, and another wait for that one: the queue lives until the last thread
//   that is inside it has left, and is not waited for where it runs a callback.
//   In a forked child no work ends: wait() raises there.
// Lock order: WorkQueue::mutex_ before nothing; a Work's own mutex is never held with it.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

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
  // `outputs` is the value of the future and the result; the tensors live until the work is gone.
  ShmWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
      std::vector<at::Tensor> outputs, std::function<void()> program);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override;

  // What a thread does before it blocks in wait(): runs works, or polls. Returns when it cannot help
  // any more. Set before the work is handed out.
  void set_helper(std::function<void(ShmWork&)> helper) { helper_ = std::move(helper); }

  // Runs the program, then publishes its end: wait() returns. Returns whether somebody holds the
  // future; if so, mark_future() runs its callbacks on this thread.
  void run();
  bool finish();
  void mark_future();

  // All of this for a work that ends without its program.
  void complete_with(std::exception_ptr error, int source_rank = -1);

 private:
  const Owner owner_;
  std::vector<at::Tensor> outputs_;
  std::function<void()> program_;
  std::function<void(ShmWork&)> helper_;
  std::exception_ptr error_;
  int source_rank_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // GUARDED_BY(mutex_); made when first asked for
};

class WorkQueue : public std::enable_shared_from_this<WorkQueue> {
 public:
  // Runs the work soon, on another thread or on the one that waits for it; at once, on this thread,
  // when `now` is set, unless others are ahead of it.
  void submit(const c10::intrusive_ptr<ShmWork>& work, bool now);

  // Lets the works end within `patience`, then calls `abort`, which makes the running one fail, and
  // fails the others. From a callback it waits for no callback. REQUIRES: called before
  // the last reference goes
  void stop(std::chrono::milliseconds patience, const std::function<void()>& abort);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Works = std::deque<c10::intrusive_ptr<ShmWork>>;

  bool runnable() const;
  void help(ShmWork& work);
  void run_next(Lock& lock);
  void run_callbacks(ShmWork& work, Lock& lock);
  void rouse_worker();
  void call_worker();
  void loop();
  bool idle(Lock& lock);
  bool calls_back_on_this_thread() const;

  std::mutex mutex_;
  std::condition_variable work_ready_;  // for workers
  std::condition_variable work_done_;   // for helpers and stop()
  Works queue_;                         // GUARDED_BY(mutex_)
  Works nested_;                        // GUARDED_BY(mutex_); submitted by callbacks
  bool running_ = false;                // GUARDED_BY(mutex_); a program is being run
  int callbacks_ = 0;                   // GUARDED_BY(mutex_); works whose callbacks are being run
  int idle_ = 0;                        // GUARDED_BY(mutex_); workers that wait
  bool stopping_ = false;               // GUARDED_BY(mutex_)
  std::vector<std::thread> workers_;    // GUARDED_BY(mutex_)
};

}  // namespace minddp::shm
