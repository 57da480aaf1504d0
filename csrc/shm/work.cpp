#include "work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <utility>

namespace minddp::shm {
namespace {

// The queue whose thread this is.
thread_local const WorkQueue* here = nullptr;

std::exception_ptr stopped_error() {
  try {
    C10_THROW_ERROR(DistBackendError, "shm: the process group was aborted or destroyed before this ran");
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

ShmWork::ShmWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> tensors,
    std::function<void()> program, std::shared_ptr<WorkQueue> queue)
    : Work(rank, type, title, tensors), tensors_(std::move(tensors)), program_(std::move(program)),
      queue_(std::move(queue)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!owner_.here()) {
    C10_THROW_ERROR(DistBackendError,
        c10::str("shm: this ", c10d::opTypeToString(opType_), " was begun by process ", owner_.pid(),
            ", from which this one was forked; it can be waited for there only"));
  }
  if (queue_->is_here()) queue_->run_until(*this);
  if (timeout > kNoTimeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!cv_.wait_for(lock, timeout, [this] { return completed_; })) {
      C10_THROW_ERROR(DistBackendError,
          c10::str("shm: ", c10d::opTypeToString(opType_), " on rank ", rank_, " was waited for ", timeout.count(),
              " ms and is not done; it goes on"));
    }
  }
  return Work::wait();
}

void ShmWork::run() {
  std::exception_ptr error;
  try {
    program_();
  } catch (...) {
    error = std::current_exception();
  }
  fail(error);
}

void ShmWork::fail(std::exception_ptr error) {
  program_ = nullptr;
  finish(std::move(error));
}

void ShmWork::call_back() {
  if (const std::exception_ptr error = exception())
    future_->setError(error);
  else
    future_->markCompleted(c10::IValue(tensors_));
}

bool WorkQueue::is_here() const { return here == this; }

void WorkQueue::submit(Pointer work) {
  Lock lock(mutex_);
  if (stopping_) {
    lock.unlock();
    work->fail(stopped_error());
    work->call_back();
  } else if (is_here()) {
    run(std::move(work), lock);
  } else {
    queue_.push_back(std::move(work));
    if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->loop(); });
    lock.unlock();
    changed_.notify_all();
  }
}

void WorkQueue::run_until(ShmWork& awaited) {
  Lock lock(mutex_);
  while (!awaited.isCompleted() && !queue_.empty()) run_next(lock);
}

// REQUIRES: mutex_ held by `lock`. Releases it meanwhile, also while the last reference to the work goes.
void WorkQueue::run(Pointer work, Lock& lock) {
  const bool in_callback = std::exchange(busy_, true);
  in_program_ = true;
  lock.unlock();
  work->run();
  lock.lock();
  in_program_ = false;
  changed_.notify_all();
  lock.unlock();
  work->call_back();
  work.reset();
  lock.lock();
  busy_ = in_callback;
  changed_.notify_all();
}

// REQUIRES: as run(), and a work queued
void WorkQueue::run_next(Lock& lock) {
  Pointer work = std::move(queue_.front());
  queue_.pop_front();
  run(std::move(work), lock);
}

void WorkQueue::loop() {
  here = this;
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    run_next(lock);
  }
}

void WorkQueue::stop(std::chrono::milliseconds patience, const std::function<void()>& abort) {
  std::deque<Pointer> abandoned;
  std::thread thread;
  bool calls_back = false;
  {
    Lock lock(mutex_);
    if (!is_here()) changed_.wait_for(lock, patience, [this] { return stopping_ || (queue_.empty() && !busy_); });
    stopping_ = true;
    abort();
    changed_.notify_all();
    changed_.wait(lock, [this] { return !in_program_; });  // it fails soon
    abandoned.swap(queue_);
    thread.swap(thread_);
    calls_back = busy_;
  }
  for (const Pointer& work : abandoned) {
    work->fail(stopped_error());
    work->call_back();
  }
  if (thread.joinable()) calls_back ? thread.detach() : thread.join();
}

}  // namespace minddp::shm
