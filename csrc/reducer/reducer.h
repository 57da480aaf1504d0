// The reducer: averages gradients over ranks while backward still makes them.
//
// The invariant. The collectives of a rank have one order, the same on all ranks. A bucket leaves when it is complete
// and all buckets before it have left. So buckets are launched in index order, even when a later one is complete
// first: the order in which gradients arrive differs from rank to rank. Out of order, different buckets would be
// added up, or ranks would wait for each other for ever.
//
// Overview. Gradients are grouped into buckets. A hook on every parameter's autograd node reports each gradient. A
// gradient is whole when its last contribution has come. On the CPU, each gradient is packed when it is whole. On a
// device (an accelerator), a bucket is packed when its last gradient is whole. At the end of backward the reducer
// waits for the collectives, bucket by bucket, and writes the results to `.grad`.
//
// A worked example: two ranks, parameters 0, 1 and 2, bucket A = {2}, bucket B = {1, 0}, second iteration.
//
//   rank 0's gradients    rank 1's gradients    what happens (on each rank; on the CPU)
//   2: [4]                2: [8]                A is complete: packed as 4/2 and 8/2, and launched, since it is first
//   1: [1, 1]             1: [3, 5]             copied to B's buffer as [.5, .5] and [1.5, 2.5]; one is missing
//   0: [6]                0: [0]                B is complete: its buffer is [.5, .5, 3] here, [1.5, 2.5, 0] there
//   end of backward                             wait for A: 2 + 4, so gradient 2 becomes [6] on both; then for B:
//                                               gradients 1 and 0 become [2, 3] and [3]
//
// Life of an iteration (enum Phase). It begins with the first gradient of a synchronized backward, and ends with the
// averages. A normal iteration makes these three moves:
//
//   kIdle -- first gradient of a synchronized backward --> kBackward
//   kBackward -- a gradient; the complete buckets that are next in order leave --> kBackward
//   kBackward -- end of backward; every gradient came, or absence is allowed --> kIdle
//
// If the caller finalizes (manual_finalization):
//
//   kBackward -- end of backward; every gradient came, or absence is allowed --> kLaunched
//   kLaunched, or kBackward with all buckets launched -- finalize_backward_manual() --> kIdle
//   kLaunched -- next forward, or optimizer.step() --> an error: not finalized (or: backward has raised)
//   kLaunched -- a gradient of any backward, too late for the average --> kLaunched, with an error; only
//                abort_iteration() leaves it
//
// If gradients are missing:
//
//   kBackward -- end of backward; gradients are missing --> kIncomplete
//   kIncomplete -- another synchronized backward, which may bring them --> kBackward
//   kIncomplete -- next forward, or optimizer.step() --> an error that names the missing gradients
//
// If an exception ends backward:
//
//   kIdle -- before the first gradient --> kIdle; nothing was sent
//   kBackward -- an exception ends backward --> kBackward still (kIdle if the post_scale callback has raised it)
//   kBackward -- next forward, or optimizer.step() --> an error: backward has not ended
//   any -- abort_iteration() --> kIdle
//
// In the first iteration buckets are large. They leave together, when the last gradient has come: as with torch's
// class, which has one bucket then. If the graph does not show how often each gradient arrives (reentrant
// checkpoints, several backwards, a static graph), they leave at the end of backward. The order of arrival is noted
// (Learned::order). The first buckets follow the reverse order of registration. Before a later forward Python makes
// new ones (set_buckets), in rank 0's order of arrival on all ranks: once, or several times with
// bucket_cap_mb="auto". Not with find_unused_parameters, nor with a pinned plan.
//
// Where a gradient may come from (enum Origin), and what becomes of it:
//
//   | its backward goes through ...           | origin        | the reducer                | step() may use it |
//   |-----------------------------------------|---------------|----------------------------|-------------------|
//   | a synchronized forward of the wrapper   | kSynchronized | averages it                | once averaged     |
//   | no synchronized forward, but one still  | kSynchronized | counts it as that          | once averaged     |
//   | waits for its backward. It adopts this  |               | forward's, as torch does   |                   |
//   | one                                     |               |                            |                   |
//   | otherwise: forwards under no_sync       | kLocal        | leaves it to the next      | yes               |
//   |                                         |               | synchronized backward      |                   |
//   | otherwise: no forward of the wrapper    | kBypassed     | leaves it to the next      | if it is equal on |
//   |                                         |               | synchronized backward      | all ranks         |
//
// Two more backwards are kSynchronized: after prepare_for_backward(), and after a synchronized forward in whose
// output no tensor was found. forwards.h has the rules.
//
// A static graph never averages what no rank used in its first iteration: there a kLocal gradient counts as
// kBypassed.
//
// A backward that accumulates into none of our parameters sends nothing. For example, the wrapped module is a frozen
// discriminator, and backward trains a generator through it.
//
// What else always holds.
//  * From the second iteration on, a parameter that takes no part is marked ready when the iteration begins, if this
//    rank knows it then: from the backward's graph, or from a static graph's first iteration. Otherwise its bucket
//    would leave at the end of backward, after the collectives of other modules (a second wrapper, SyncBatchNorm). On
//    a rank that uses the parameter it leaves before them. So the order of collectives would differ between ranks.
//  * A rank sends its whole `.grad`. Earlier averages in it are equal on all ranks, so averaging keeps them.
//  * A mean is a sum and a division. For a mean Python sets `pre_scale` to 1/ranks. The division is part of packing:
//    that costs no pass over memory, and keeps half precision in range. `post_scale` is applied while unpacking. If
//    that factor is known only at the end of backward, a case gives it (scale_of_results).
//
// Threads. Hooks and the end-of-backward callback run on autograd's threads: the caller's for the CPU, one for each
// device otherwise. Several such threads run if parameters are on several devices, or if a program calls backward()
// in several threads. So whatever they call takes mutex_, and holds it while it waits for the collectives at the end
// of backward. finalize_backward_manual() takes it, too. Lock order: mutex_, then the GIL. Python callbacks run with
// mutex_ held and may call the reducer again, so mutex_ is recursive. Nobody may wait for mutex_ while holding the
// GIL. Most other functions take no lock: only the training thread calls them, or a hook that holds mutex_. A Python
// thread reads this rank's position, to report it (bindings.cpp: position). It takes no lock, so its numbers may be
// old.
//
// reducer.cpp has what runs in an iteration; between_iterations.cpp has the rest.
#pragma once

#include "comm_hook.h"
#include "events.h"
#include "grad_hooks.h"

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace minddp {

class Reducer : public std::enable_shared_from_this<Reducer>, public ReducerState {
 public:
  using Buckets = std::vector<std::vector<size_t>>;  // parameter indices by bucket, in launch order

  // Cases are added next; then set_buckets() makes the first buckets, and hooks on the parameters.
  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
      c10::intrusive_ptr<c10d::ProcessGroup> group, ReducerOptions options);
  ~Reducer();
  // A case belongs to one reducer. REQUIRES: no backward runs; a case that makes buckets, or that needs
  // before_accumulation(), comes before the first buckets.
  void add(std::shared_ptr<Case> added);
  const std::vector<std::shared_ptr<Case>>& cases() const { return cases_; }

  // --- in an iteration (reducer.cpp) ---

  // begin_forward() is called before a forward with gradients, end_forward() after it. A backward that reaches one of
  // `outputs`, or another node made between the two calls, is this forward's.
  void begin_forward();
  void end_forward(const std::vector<at::Tensor>& outputs, bool synchronized);
  // For callers that decide when to synchronize. From this call until an iteration ends each backward synchronizes,
  // even one through a forward under no_sync.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  // A backward is noticed: it has reached an output of a forward, synchronized or not, or (empty) brought a gradient.
  void enter_backward(std::optional<bool> through_synchronized_forward);
  void on_ready(size_t index, const at::Tensor& contribution);  // the hook of parameter `index`
  // With manual_finalization: waits and unpacks, on the caller's current streams. To be called once for each
  // iteration, after its backward or from a hook in it. REQUIRES: ready_to_finalize().
  void finalize_backward_manual();
  bool ready_to_finalize() const {
    return (iteration.phase == Phase::kLaunched && !iteration.too_late) ||
        (iteration.phase == Phase::kBackward && all_launched());
  }
  // Back to kIdle, whatever has happened; the buckets' collectives are abandoned. If training goes on after an error,
  // every rank must call it.
  void abort_iteration();

  // Starts a bucket's reduction, by the communication hook if there is one. all_reduce() does not use the hook; the
  // hook may call it.
  Flight reduce(size_t index, const at::Tensor& buffer) {
    return hook_ ? hook_->start(index, buffer) : all_reduce(index, buffer);
  }
  Flight all_reduce(size_t index, const at::Tensor& buffer);
  // The reducer waits for `future` before the current iteration ends, or the next one if none runs.
  void wait_after_backward(c10::intrusive_ptr<Future> future) { extra_futures_.push_back(std::move(future)); }
  // Guards all that runs in a backward.
  std::unique_lock<std::recursive_mutex> guard() { return std::unique_lock(mutex_); }

  // --- between iterations (between_iterations.cpp) ---

  // A rank that has no backward of its own (join) sends an empty used map, and adds one to learned.iterations.
  // Returns the map's collective, to be waited for; null where there is none. In a static graph's first iteration it
  // waits itself.
  c10::intrusive_ptr<Future> shadow_used_map();
  void set_buckets(const Buckets& buckets);  // REQUIRES: each parameter once, one dtype and device a bucket
  void release_buckets();
  // Hooks for parameters that have another node. Does not bring back hooks that remove_hooks() has removed.
  void renew_hooks() {
    if (hooks_) hooks_->renew(parameters);
  }
  void remove_hooks() { hooks_.reset(); }
  // `before` is the older reducer of this module. Copies what it knows of the gradients that both reduce.
  void take_over(const Reducer& before);
  void set_comm_hook(std::unique_ptr<CommHook> hook) { hook_ = std::move(hook); }
  // Raises if an iteration has begun and is not over. Inside of a backward it raises in kLaunched alone: in other
  // phases this backward may still complete the iteration.
  void check_finished() const;

  // Set between iterations.
  bool optimizer_in_backward = false;   // a communication hook runs the optimizer, so nothing is unpacked
  bool skip_all_reduce_unused = false;  // the caller promises that ranks leave the same buckets unused
  bool manual_finalization = false;     // the caller waits and unpacks; set while no backward is expected
  double pre_scale = 1.0, post_scale = 1.0;

  bool graph_is_static() const { return graph_is_static_; }  // the same parameters were missing every time
  std::vector<size_t> missing() const;                       // in this iteration
  // A synchronized forward has no backward yet, or its iteration is not over.
  bool expects_backward() const { return iteration.phase != Phase::kIdle || forwards.awaits_backward(); }
  // A synchronized backward runs, or its averages are waited for. Known once it has been noticed.
  bool in_backward() const { return finalizing_ || (backward.runs() && backward.is_synchronized()); }
  std::vector<int32_t> sum_of_used_maps();  // how many ranks used each parameter; without a map: 1 if this one did

 private:
  // --- the states, as predicates
  bool has_ended_once() const { return learned.iterations > 0; }
  bool all_launched() const { return iteration.next_bucket == buckets.size(); }
  bool has_left(size_t bucket) const { return bucket < iteration.next_bucket; }
  // The invariant: this bucket is complete, and all before it have left.
  bool may_leave(size_t bucket) const { return bucket == iteration.next_bucket && buckets[bucket]->complete(); }
  // True while nobody knows how often a gradient arrives: in the first iteration, and from an adopted backward to the
  // end of its iteration, unless their graph shows it. While it is true, no bucket leaves before the end of backward,
  // so a gradient that is added to can be packed again.
  bool arrivals_unknown() const { return (!has_ended_once() && !iteration.comes_once) || iteration.launches_at_end; }
  // In the first iteration torch's class has one bucket, unless it looks for unused parameters.
  bool waits_for_all() const {
    return !has_ended_once() && used_map.mode() != GraphMode::kFindUnused &&
        !std::ranges::all_of(buckets, [](const auto& bucket) { return bucket->complete(); });
  }
  // One rank, and nothing needs the buffers: the gradients are the result already.
  bool passes_through() const {
    return is_alone() && !hook_ && all_plain_ && pre_scale == 1.0 && post_scale == 1.0 && !manual_finalization &&
        std::ranges::none_of(cases_, [](const auto& c) { return c->needs_buckets(); });
  }
  bool skips(size_t bucket) const;

  void notify(Moment moment) {
    for (auto& c : cases_) c->on(moment);
  }
  void notify(BucketMoment moment, size_t bucket) {
    for (auto& c : cases_) c->on(moment, bucket);
  }

  void install_hooks();
  std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>& indices);
  void watch(const std::vector<at::Tensor>& outputs, bool synchronized);
  void predict_arrivals(bool graph_is_its_own);
  void await_end_of(int graph_task);
  void begin_iteration();
  void mark_variable_ready(size_t index, const at::Tensor& contribution);
  void on_extra_arrival(size_t index, const at::Tensor& contribution);
  void pack_on_arrival(size_t index, const at::Tensor& contribution);
  void pack(size_t bucket, const at::Tensor& contribution);
  void launch(size_t bucket);
  void launch_or_skip(size_t bucket);
  void finish_backward(int graph_task);
  void on_backward_gone(int graph_task);
  void launch_rest(int graph_task);
  void finalize_backward();
  void unpack(size_t bucket, double scale, const std::vector<int32_t>& used_anywhere);
  double scale_of_results();
  void end_iteration();
  void send_used_map();
  Wait wait_for(size_t bucket) {
    return [this, bucket](Future& future) { wait(future, bucket); };
  }
  void wait(Future& future, size_t bucket);
  Bucket::Packing packing(const at::Tensor& contribution) const {
    return {pre_scale, arrivals_unknown(), used, contribution};
  }

  std::vector<std::shared_ptr<Case>> cases_;
  std::vector<Case*> before_accumulation_, follow_gradients_;  // those of them that ask for it
  std::unique_ptr<CommHook> hook_;
  std::unique_ptr<GradHooks> hooks_;
  std::recursive_mutex mutex_;
  std::vector<std::pair<size_t, size_t>> bucket_and_slot_;  // by parameter
  std::vector<c10::intrusive_ptr<Future>> extra_futures_;
  std::vector<size_t> last_missing_;
  bool graph_is_static_ = true;
  bool all_plain_ = true;       // see Bucket::is_plain()
  bool finalizing_ = false;     // the last node of a synchronized backward has run, and its averages are waited for
  size_t next_hook_check_ = 0;  // the parameter whose hook the next forward looks at
};

}  // namespace minddp
