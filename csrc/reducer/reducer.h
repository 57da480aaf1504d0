// The reducer: averages gradients over ranks while backward still makes them.
//
// Overview. Gradients are grouped into buckets. A hook on every parameter tells when its gradient is whole;
// the bucket whose last gradient that was is packed and, once all buckets before it are on their way, handed
// to the process group. At the end of backward the reducer waits for the collectives, bucket by bucket, and
// writes the results to `.grad`.
//
// Life of an iteration (enum Phase):
//
//   kIdle -- first gradient of a backward through a synchronized forward --> kBackward
//   kBackward -- end of backward; every gradient came, or absence is allowed --> kIdle
//   kBackward -- the same, where finalization is the caller's --> kLaunched
//   kLaunched, or kBackward with all buckets launched -- finalize_backward_manual() --> kIdle
//   kLaunched -- next forward, or optimizer.step() --> an error that says so
//   kLaunched -- a gradient, which would be lost --> kBackward, with an error
//   kBackward -- end of backward; gradients are missing --> kIncomplete
//   kIncomplete -- another such backward, which may bring them --> kBackward
//   kIncomplete -- next forward, or optimizer.step() --> an error that names them
//   any -- abort_iteration() --> kIdle
//
// A backward that accumulates into none of our parameters changes nothing: an attack on the inputs, a Jacobian, a
// step of a generator behind a frozen discriminator. Nor does one that is not synchronized (forwards.h); it only
// notes which parameters it used.
//
// What always holds.
//  * Buckets are launched in index order, even when a later one is complete first: collectives of one group
//    must be issued in the same order on every rank, and the order of arrival differs from rank to rank.
//  * A parameter that takes no part is marked ready when the iteration begins. Were its bucket held back until
//    backward is over, it would be launched behind other modules' collectives, on those ranks alone that did not
//    use it.
//  * The first synchronized iteration packs like any other, and launches nothing before its end. From it come the
//  order of arrival, along
//    which buckets are cut anew (trace.h), and the number of arrivals per parameter (param_usage.h).
//  * What a rank sends is a parameter's whole `.grad`: averages of earlier backwards in it are the same on all ranks.
//    (Where the reduction is no mean, a gradient must not hold an earlier one: earlier_sums.h.)
//  * `.grad` is where a gradient is. A backward of distributed autograd's puts it elsewhere: context_gradients.h.
//  * A mean is a sum and a division. `pre_scale` divides while packing, which costs no pass over memory and
//    keeps half precision in range; `post_scale` while unpacking, for what is known only then.
//
// Threads. Hooks and the end-of-backward callback run on autograd's threads: the caller's for the CPU, one for each
// device otherwise. They are several where parameters live on several devices, and where a program calls backward()
// in threads of its own; so each takes mutex_. Lock order: mutex_, then the GIL (Python callbacks are called with
// mutex_ held, and may come back: it is recursive), so nobody may hold the GIL while asking for mutex_. Everything
// else REQUIRES that no backward is running; but what a rank tells of where it is (bindings.cpp: position) reads
// numbers that may change meanwhile.
#pragma once

#include "bucket.h"
#include "comm_hook.h"
#include "forwards.h"
#include "grad_hooks.h"
#include "param_usage.h"
#include "support/completed.h"
#include "support/earlier_sums.h"
#include "support/same_tensor.h"
#include "support/sharers.h"
#include "support/trace.h"
#include "transport/allreduce.h"
#include "used_map.h"

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace minddp {

enum class Phase { kIdle, kBackward, kIncomplete, kLaunched };

struct ReducerOptions {
  GraphMode graph_mode = GraphMode::kAllUsed;
  std::optional<at::ScalarType> reduce_dtype;  // what travels; empty: the gradients' own
  bool gradient_as_bucket_view = false;
  bool skip_all_reduce_unused = false;  // the same buckets are unused on every rank
  bool sums_anew = false;               // the reduction is no mean; see earlier_sums.h
  bool any_grad_dtype = false;          // parameters change their dtype during backward
  bool always_reduce = false;           // go through the process group where it has one rank, too
  bool lazy_bucket_allocation = false;  // a bucket has memory from its first gradient to the end of its iteration
  std::string not_in_contexts;  // why no context's gradients can be reduced (context_gradients.h); empty: they can
  bool manual_finalization = false;  // waiting and unpacking are left to the caller; REQUIRES: none is expected
  double pre_scale = 1.0;
  double post_scale = 1.0;
};

// Called on autograd's threads; each may raise, which ends backward with that error.
struct ReducerCallbacks {
  std::function<void()> after_last_launch;  // at the end of backward; may issue collectives of its own
  std::function<double()> post_scale;       // in place of the option's, called once before unpacking
  std::function<void()> on_taken;           // before launching what a backward past the wrapper brought: forwards.h
  std::function<void(const std::string& why)> on_interrupted;  // an exception has ended an iteration's backward
  std::function<void(double seconds, size_t bucket, const std::string& error)> on_stall;  // support/watched_wait.h
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  using Buckets = std::vector<std::vector<size_t>>;  // parameter indices by bucket, in launch order

  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<bool> expect_sparse,
      c10::intrusive_ptr<c10d::ProcessGroup> group, ReducerOptions options, const Buckets& buckets);
  // (Re)places the hooks; needed after construction, and when parameters change their dtype.
  void install_hooks();
  // Once parameters may have other nodes. Hooks that were removed stay away.
  void renew_hooks() {
    if (hooks_) hooks_->renew(parameters_);
  }
  void remove_hooks() { hooks_.reset(); }
  // Goes on where `before`, of the same module, ends: with what is known of the gradients that both reduce. What all
  // ranks have is all ranks' of one group only. REQUIRES: no backward is running.
  void take_over(const Reducer& before);

  // Raises when the backward before left gradients un-averaged.
  void check_finished() const;
  // Around a forward with gradients. A backward that reaches one of `outputs`, or another node that was made in
  // between, is this forward's.
  void begin_forward();
  void end_forward(const std::vector<at::Tensor>& outputs, bool synchronized);
  // For callers that decide by themselves when to synchronize: the next backward is, wherever forward ran.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  // With options().manual_finalization: waits and unpacks, once for each synchronized backward, from a hook in it or
  // after it; on the caller's current streams. REQUIRES: ready_to_finalize().
  void finalize_backward_manual();
  bool ready_to_finalize() const {
    return phase_ == Phase::kLaunched || (phase_ == Phase::kBackward && next_bucket_ == buckets_.size());
  }
  // A synchronized forward waits for its backward, or that one for its end.
  bool expects_backward() const { return phase_ != Phase::kIdle || forwards_.awaits_backward(); }
  // Back to kIdle, whatever has happened. Ranks that go on together must all call it, after an error that all met.
  void abort_iteration();
  void on_ready(size_t index, const at::Tensor& contribution);  // the hook of parameter `index`

  void set_buckets(const Buckets& buckets);  // REQUIRES: each parameter once, one dtype and device a bucket
  void release_buckets();
  void adopt_gradients();  // with gradient_as_bucket_view: those that are there, between iterations
  void set_comm_hook(std::unique_ptr<CommHook> hook) { hook_ = std::move(hook); }
  // The reduction of a bucket: with the hook, and what the reducer does without one (for hooks that wrap it).
  Flight run_hook(GradBucket& b) {
    if (!hook_) return run_allreduce(b);
    return {hook_->run(b), std::exchange(hooks_work_, nullptr)};  // evaluated in this order
  }
  // A hook that asks for it gets the future alone; the reducer keeps the work, which orders streams (wait.h).
  Flight run_allreduce(const GradBucket& b) {
    if (alone()) return {completed(b.buffer()), nullptr};  // its own sum
    Flight flight = allreduce(*group_, b.buffer(), [&](Future& future) { wait(future, b.index()); });
    if (hook_ && !b.buffer().device().is_cpu()) hooks_work_ = flight.work;
    return flight;
  }
  GradBucket grad_bucket(size_t index, at::Tensor buffer) const {
    return {index, index + 1 == buckets_.size(), std::move(buffer), buckets_[index].slots()};
  }
  // Waited for at the end of the next synchronized backward.
  void wait_after_backward(c10::intrusive_ptr<Future> future) { extra_futures_.push_back(std::move(future)); }
  // A rank that has no backward of its own (join) sends an empty used map, and counts the iteration.
  void shadow_used_map() {
    std::fill(usage_.local_used_map.begin(), usage_.local_used_map.end(), 0);
    send_used_map();
    used_map_.follow([&](Future& future) { wait(future, buckets_.size()); });
    ++trace_->iteration;
    ++ended_;
  }

  // `other` reduces some of these parameters too. Where one of the two makes gradients `views`, a backward through
  // both is refused.
  void share(const std::shared_ptr<Reducer>& other, bool views) {
    sharers_.add(other, other->parameters_, parameters_, views);
  }

  ReducerOptions& options() { return options_; }
  ReducerCallbacks& callbacks() { return callbacks_; }
  bool sync_enabled = true;            // outside of no_sync; read when forward runs, and for a warning in backward
  bool optimizer_in_backward = false;  // a hook has consumed the gradients: nothing to unpack

  Phase phase() const { return phase_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  size_t next_bucket() const { return next_bucket_; }
  const Trace& trace() const { return *trace_; }
  bool has_recorded() const { return ended_ > 0; }  // the first synchronized backward is over
  int64_t ended() const { return ended_; }          // how many are, of this rank's or in its absence
  const Forwards::History& history() const { return forwards_.history(); }
  bool graph_is_static() const { return graph_is_static_; }  // the same parameters were missing every time
  const std::string& last_error() const { return last_error_; }
  std::vector<size_t> missing() const;
  // An exception has ended a synchronized backward, and there was no forward since. Where it came from the hook of a
  // first gradient, that gradient is local, and nothing else shows it.
  bool interrupted() const { return interrupted_in_ != ParamUsage::kNone; }
  // A synchronized backward runs: known once it has reached an output of forward, before the first gradient.
  bool in_backward() const { return !backward_.graph_tasks.empty() && backward_.origin == Origin::kSynchronized; }
  // Parameters with a gradient of this rank alone, which no_sync did not ask for, and the backward that it came in.
  // It may have come through another wrapper's forward: then that one's arrived_in is not smaller.
  std::vector<std::pair<size_t, int>> bypassed() const;
  // Parameters with a gradient of a forward under no_sync whose backward ran outside of it, and not synchronized
  // since.
  std::vector<size_t> left_local() const;
  int arrived_in(size_t index) const { return usage_.arrived_in[index]; }
  // The last backward that brought it, or may have before an exception ended that one.
  int touched_in(size_t index) const { return std::max(usage_.arrived_in[index], interrupted_in_); }
  // An iteration has ended here in that backward or since, and nothing of it has come after that.
  bool averaged_since(size_t index, int backward) const {
    return phase_ == Phase::kIdle && !usage_.local_used_map[index] && !used_map_.gets_no_gradient(index) &&
        ended_in_ >= backward && ended_in_ > interrupted_in_;
  }
  std::vector<int32_t> used_map() {  // by parameter: ranks that used it, as of the last synchronization
    return used_map_.sum(usage_.local_used_map, [&](Future& future) { wait(future, buckets_.size()); });
  }

 private:
  void watch(const std::vector<at::Tensor>& outputs, bool synchronized);
  void enter_backward(std::optional<bool> through_synchronized_forward);
  void begin_iteration();
  void refuse_shared_view(size_t index) const;
  void refuse_earlier_sum(size_t index);
  void mark_variable_ready(size_t index, const at::Tensor& contribution);
  void note_origin(size_t index);
  void enter_context(size_t index, bool defined);
  void take(size_t index, const at::Tensor& contribution);
  void gradient_grew(size_t index, const at::Tensor& contribution);
  void pack(size_t index, const at::Tensor& contribution);
  void launch(size_t index);
  bool skips(size_t index) const;
  void launch_or_skip(size_t index);
  void await_end_of(int graph_task);
  void finish_backward(int graph_task);
  void backward_is_gone(int graph_task);
  void launch_rest(int graph_task);
  void finalize_backward();
  void send_used_map() { used_map_.send(*group_, usage_.local_used_map, parameters_[0].device()); }
  void wait(Future& future, size_t bucket);
  double post_scale();
  void end_iteration();
  // One rank, and nothing to scale, cast or show: its gradients are the result, where they lie.
  bool passes_through() const {
    return alone() && !hook_ && !callbacks_.post_scale && options_.pre_scale == 1.0 && options_.post_scale == 1.0 &&
        !options_.gradient_as_bucket_view && !options_.reduce_dtype && !any_sparse_ && !options_.manual_finalization;
  }
  // Nobody knows yet how often a gradient arrives in this iteration: all are taken as they come, nothing is sent
  // before its end.
  bool may_grow() const { return !has_recorded() || deferred_; }
  bool alone() const { return group_->getSize() == 1 && !options_.always_reduce; }
  Bucket::Slot& slot_of(size_t index) const { return (*buckets_[place_[index].first].slots())[place_[index].second]; }
  [[noreturn]] void fail(const std::string& message) const;
  std::unique_lock<std::recursive_mutex> guard() { return std::unique_lock(mutex_); }

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const std::vector<bool> expect_sparse_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const bool any_sparse_;
  ReducerOptions options_;
  ReducerCallbacks callbacks_;
  std::unique_ptr<CommHook> hook_;
  c10::intrusive_ptr<c10d::Work> hooks_work_;  // of the reducer's own collective, where a hook has asked for it
  std::unique_ptr<GradHooks> hooks_;

  std::recursive_mutex mutex_;  // guards all that follows
  Phase phase_ = Phase::kIdle;
  int64_t ended_ = 0;
  int ended_in_ = ParamUsage::kNone;        // the backward in which the last iteration ended
  int interrupted_in_ = ParamUsage::kNone;  // which backward that was
  bool deferred_ = false;  // this iteration's gradients may come again: nothing is sent before its end
  size_t turn_ = 0;        // whose hook was looked at last
  bool graph_is_static_ = true;
  std::vector<size_t> last_missing_;
  mutable std::string last_error_;
  std::vector<Bucket> buckets_;
  std::vector<std::pair<size_t, size_t>> place_;  // by parameter: bucket, slot
  size_t next_bucket_ = 0;                        // the first that is not launched
  Forwards forwards_;
  // The backward that has reached us, from its first sign to its end. It has several graph tasks where a program runs
  // backward() in threads, each through an output of its own. A reentrant checkpoint's graph task is none of these.
  struct {
    std::vector<int> graph_tasks;
    bool has(int graph_task) const { return std::ranges::count(graph_tasks, graph_task) > 0; }
    Origin origin = Origin::kBypassed;
    bool taken = false;            // for a forward that waits, of which the graph holds no sign
    bool makes_graph = false;      // create_graph=True
    bool goes_to_all = false;      // autograd.grad() goes to given inputs, and may bring no gradient at all
    uint64_t begin = 0;            // of the nodes that it makes
    ParamUsage::Flags takes_part;  // empty where nobody asks
  } backward_;
  ParamUsage usage_;
  UsedMap used_map_;
  ContextIterations<ParamUsage> context_;
  EarlierSums sums_;
  Sharers<Reducer> sharers_;
  std::vector<c10::intrusive_ptr<Future>> extra_futures_;
  std::shared_ptr<Trace> trace_;  // shared with the collectives' completion callbacks
};

}  // namespace minddp
