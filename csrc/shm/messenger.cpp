#include "messenger.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <utility>

#include "threads.h"

namespace minddp::shm {
namespace {

constexpr auto kSleep = std::chrono::milliseconds(50);

std::exception_ptr make_error(const std::string& text) {
  try {
    C10_THROW_ERROR(DistBackendError, "shm: " + text);
  } catch (...) {
    return std::current_exception();
  }
}

// The requests passed by because they have to wait: what a later one must not overtake.
class Passed {
 public:
  void add(int peer, int tag) {
    pairs_.emplace(peer, tag);
    tags_.insert(tag);
  }

  bool blocks(int peer, int tag) const {
    return pairs_.contains({peer, tag}) || pairs_.contains({Mailbox::kAnySource, tag}) ||
        (peer == Mailbox::kAnySource && tags_.contains(tag));
  }

 private:
  std::set<std::pair<int, int>> pairs_;
  std::set<int> tags_;
};

}  // namespace

void Messenger::send(Span message, int to, int tag, std::chrono::milliseconds timeout, Done done) {
  submit(sends_, {true, message, to, tag, Deadline(timeout), std::move(done)});
}

void Messenger::receive(Span buffer, int from, int tag, std::chrono::milliseconds timeout, Done done) {
  submit(receives_, {false, buffer, from, tag, Deadline(timeout), std::move(done)});
}

void Messenger::submit(Requests& requests, Request request) {
  {
    const std::lock_guard<std::mutex> lock(requests.mutex);
    requests.list.push_back(std::move(request));
    requests.size = requests.list.size();
  }
  progress(requests);
  if (!waiting()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return;
  if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->loop(); });
  changed_.notify_one();
}

void Messenger::progress() {
  progress(sends_);
  progress(receives_);
}

void Messenger::progress(Requests& requests) {
  std::vector<Outcome> outcomes;
  if (requests.size > 0) {
    const std::lock_guard<std::mutex> lock(requests.mutex);
    // A message that comes while this goes through the list belongs to the first request that fits it,
    // even if that was already passed by. To one receiver all tags go one way.
    Passed passed;
    for (auto it = requests.list.begin(); it != requests.list.end();) {
      const int lane = it->sends ? 0 : it->tag;
      Outcome outcome;
      if (!passed.blocks(it->peer, lane) && attempt(*it, outcome)) {
        outcomes.push_back(std::move(outcome));
        it = requests.list.erase(it);
      } else {
        passed.add(it->peer, lane);
        ++it;
      }
    }
    requests.size = requests.list.size();
  }
  callbacks_ += outcomes.size();
  for (Outcome& outcome : outcomes) {
    outcome.done(outcome.peer, outcome.error);
    --callbacks_;
  }
}

// Whether the request has ended, and how.
bool Messenger::attempt(Request& request, Outcome& outcome) {
  // Asked first: what a rank sent before it went away is still received.
  const std::string hopeless = why_hopeless(request);
  std::string error;
  int peer = -1;
  try {
    if (request.sends)  // but not what this rank sends after it went away itself: nobody expects it any more
      peer = !stopping_ && mailbox_.try_send(request.memory, request.peer, request.tag) ? request.peer : -1;
    else
      peer = mailbox_.try_receive(request.memory, request.peer, request.tag);
    error = peer < 0 ? hopeless : "";
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  if (peer < 0 && error.empty()) return false;
  outcome = {std::move(request.done), peer, error.empty() ? nullptr : make_error(error)};
  return true;
}

std::string Messenger::why_hopeless(const Request& request) {
  std::string gone;
  if (request.peer != Mailbox::kAnySource && request.peer != group_->rank()) gone = group_->why_gone(request.peer);
  if (gone.empty() && stopping_) gone = "the process group was aborted or destroyed on this rank";
  if (gone.empty() && request.deadline.left().count() <= 0)
    gone = c10::str(
        request.sends ? "none was received" : "nothing came", " within ", request.deadline.timeout.count(), " ms");
  if (gone.empty()) return "";
  const std::string rank = c10::str("rank ", group_->rank());
  if (request.sends)
    return c10::str(rank, " sends to rank ", request.peer, " with tag ", request.tag,
        stopping_ ? c10::str() : c10::str(", where ", Mailbox::kEntries, " earlier messages are unreceived"), ": ",
        gone);
  const std::string from = request.peer == Mailbox::kAnySource ? "any rank" : "rank " + std::to_string(request.peer);
  return c10::str(rank, " receives from ", from, " with tag ", request.tag, ": ", gone);
}

void Messenger::loop() {
  Counter& bell = group_->control(group_->rank()).bell;
  while (!stopping_) {
    const uint32_t seen = bell.load();
    progress();
    std::unique_lock<std::mutex> lock(mutex_);
    if (waiting()) {
      lock.unlock();
      bell.sleep(seen, kSleep);
    } else {
      changed_.wait(lock, [this] { return stopping_ || waiting(); });
    }
  }
}

void Messenger::stop(std::chrono::milliseconds patience) {
  Counter& bell = group_->control(group_->rank()).bell;
  const Deadline deadline(patience);
  while (sends_.size > 0 && !stopping_ && deadline.left().count() > 0) {
    const uint32_t seen = bell.load();
    progress(sends_);
    if (sends_.size > 0) bell.sleep(seen, std::min<std::chrono::milliseconds>(kSleep, deadline.left()));
  }
  std::thread thread;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    thread.swap(thread_);
  }
  changed_.notify_all();
  bell.ring();
  end_thread(thread, callbacks_ > 0);
  progress();
}

}  // namespace minddp::shm
