#include "work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <utility>

#include "threads.h"

namespace minddp::shm {
namespace {

// A callback that waits for a work queued behind it would hold the queue up for ever. After this time
// the queue goes on without it.
constexpr auto kCallbackPatience = std::chrono::seconds(30);

// The queues whose callbacks this thread runs, the innermost first.
struct Callbacks {
  const WorkQueue* queue;
  const Callbacks* outer;
};
thread_local const Callbacks* callbacks_here = nullptr;

bool in_callback_of(const WorkQueue* queue) { return callbacks_here != nullptr && callbacks_here->queue == queue; }

std::exception_ptr stopped_error() {
  try {
    C10_THROW_ERROR(DistBackendError, "shm: the process group was aborted or destroyed before this ran");
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

ShmWork::ShmWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
    std::vector<at::Tensor> outputs, std::function<void()> program)
    : Work(rank, type, title, inputs), outputs_(std::move(outputs)), program_(std::move(program)) {}

int ShmWork::sourceRank() const {
  TORCH_CHECK(source_rank_ >= 0, "shm: sourceRank() is known for a receive that has completed");
  return source_rank_;
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!owner_.here()) {
    C10_THROW_ERROR(DistBackendError,
        c10::str("shm: this ", c10d::opTypeToString(opType_), " was begun by process ", owner_.pid(),
            ", from which this one was forked; it can be waited for there only"));
  }
  // With a limit of its own the caller must not get stuck in a collective: then it only looks on.
  if (timeout <= kNoTimeout) {
    if (helper_ && !isCompleted()) helper_(*this);
    return Work::wait();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (!cv_.wait_for(lock, timeout, [this] { return completed_; })) {
    C10_THROW_ERROR(DistBackendError,
        c10::str("shm: ", c10d::opTypeToString(opType_), " on rank ", rank_, " was waited for ", timeout.count(),
            " ms and is not done; it goes on"));
  }
  lock.unlock();
  return Work::wait();
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (completed_) {
      lock.unlock();
      mark_future();
    }
  }
  return future_;
}

void ShmWork::mark_future() {
  if (error_)
    future_->setError(error_);
  else
    future_->markCompleted(c10::IValue(outputs_));
}

void ShmWork::run() {
  try {
    program_();
  } catch (...) {
    error_ = std::current_exception();
  }
  program_ = nullptr;
}

bool ShmWork::finish() {
  // Who marks the future is settled together with completed_: the caller, if it exists by now, else
  // getFuture(), which will find the work completed.
  bool has_future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    completed_ = true;
    exception_ = error_;
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
    has_future = static_cast<bool>(future_);
  }
  cv_.notify_all();
  return has_future;
}

void ShmWork::complete_with(std::exception_ptr error, int source_rank) {
  program_ = nullptr;
  error_ = std::move(error);
  source_rank_ = source_rank;
  if (finish()) mark_future();
}

void WorkQueue::submit(const c10::intrusive_ptr<ShmWork>& work, bool now) {
  work->set_helper([self = shared_from_this()](ShmWork& waited) { self->help(waited); });
  Lock lock(mutex_);
  if (stopping_) {
    lock.unlock();
    work->complete_with(stopped_error());
    return;
  }
  const bool is_next = nested_.empty() && (in_callback_of(this) || queue_.empty());
  (in_callback_of(this) ? nested_ : queue_).push_back(work);
  if (now && is_next && runnable()) run_next(lock);
  rouse_worker();
}

// REQUIRES: mutex_ held
bool WorkQueue::runnable() const { return !running_ && (!nested_.empty() || (callbacks_ == 0 && !queue_.empty())); }

// REQUIRES: mutex_ held
void WorkQueue::rouse_worker() {
  if (runnable()) call_worker();
}

// REQUIRES: mutex_ held
void WorkQueue::call_worker() {
  if (stopping_) return;
  if (idle_ > 0)
    work_ready_.notify_one();
  else
    workers_.emplace_back([self = shared_from_this()] { self->loop(); });
}

void WorkQueue::help(ShmWork& work) {
  Lock lock(mutex_);
  while (!work.isCompleted() && !stopping_) {
    // A callback that waits for a work of the queue lets the queue pass.
    const bool lets_pass = in_callback_of(this) && !running_ && !queue_.empty();
    if (runnable() || lets_pass)
      run_next(lock);
    else
      work_done_.wait(lock);
  }
  rouse_worker();
}

// REQUIRES: mutex_ held by `lock`, nothing running, a work queued. Releases the mutex meanwhile.
void WorkQueue::run_next(Lock& lock) {
  running_ = true;
  Works& works = nested_.empty() ? queue_ : nested_;
  const c10::intrusive_ptr<ShmWork> work = std::move(works.front());
  works.pop_front();
  lock.unlock();
  work->run();
  lock.lock();
  running_ = false;
  // Counted before anyone can see the work's end, or the next work might begin in between.
  ++callbacks_;
  lock.unlock();
  const bool has_future = work->finish();
  lock.lock();
  if (has_future) run_callbacks(*work, lock);
  --callbacks_;
  work_done_.notify_all();
}

// REQUIRES: mutex_ held by `lock`. Releases it meanwhile.
void WorkQueue::run_callbacks(ShmWork& work, Lock& lock) {
  work_done_.notify_all();
  call_worker();  // stands by for what the callbacks submit, and lest they take too long
  const Callbacks here{this, callbacks_here};
  callbacks_here = &here;
  lock.unlock();
  work.mark_future();
  lock.lock();
  callbacks_here = here.outer;
}

void WorkQueue::loop() {
  Lock lock(mutex_);
  while (!stopping_) {
    const bool waited_too_long = !runnable() && !idle(lock);
    if (runnable() || (waited_too_long && !running_ && !queue_.empty())) run_next(lock);
  }
}

// Waits for work; false when callbacks have held the queue up for too long. REQUIRES: mutex_ held
bool WorkQueue::idle(Lock& lock) {
  ++idle_;
  bool roused = true;
  if (callbacks_ > 0)
    roused = work_ready_.wait_for(lock, kCallbackPatience) == std::cv_status::no_timeout;
  else
    work_ready_.wait(lock);
  --idle_;
  return roused;
}

void WorkQueue::stop(std::chrono::milliseconds patience, const std::function<void()>& abort) {
  Works abandoned;
  std::vector<std::thread> workers;
  bool callback_runs = false;
  {
    Lock lock(mutex_);
    const bool from_callback = calls_back_on_this_thread();
    work_done_.wait_for(lock, patience, [&] {
      const bool drained = queue_.empty() && nested_.empty() && !running_;
      return stopping_ || (drained && (from_callback || callbacks_ == 0));
    });
    callback_runs = callbacks_ > 0;
    abort();
    stopping_ = true;
    abandoned.swap(queue_);
    abandoned.insert(abandoned.end(), nested_.begin(), nested_.end());
    nested_.clear();
    workers.swap(workers_);
  }
  work_ready_.notify_all();
  work_done_.notify_all();
  for (const auto& work : abandoned) work->complete_with(stopped_error());
  for (std::thread& worker : workers) end_thread(worker, callback_runs);
}

bool WorkQueue::calls_back_on_this_thread() const {
  const Callbacks* callbacks = callbacks_here;
  while (callbacks != nullptr && callbacks->queue != this) callbacks = callbacks->outer;
  return callbacks != nullptr;
}

}  // namespace minddp::shm
