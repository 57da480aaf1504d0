// The reducer: averages gradients over ranks while backward still makes them.
//
// Overview. Gradients are grouped into buckets. A hook on every parameter's autograd node reports each gradient. A
// gradient is whole when its last contribution has come. On the CPU, each gradient is packed when it is whole. On a
// device (an accelerator), a bucket is packed when its last gradient is whole. A packed bucket is handed to the
// process group once all buckets before it have left. At the end of backward the reducer waits for the collectives,
// bucket by bucket, and writes the results to `.grad`.
//
// Life of an iteration (enum Phase). It begins with the first gradient of a synchronized backward, and ends with the
// averages:
//
//   kIdle -- first gradient of a synchronized backward --> kBackward
//   kBackward -- end of backward; every gradient came, or absence is allowed --> kIdle
//   kBackward -- the same, if the caller finalizes (manual_finalization) --> kLaunched
//   kLaunched, or kBackward with all buckets launched -- finalize_backward_manual() --> kIdle
//   kLaunched -- next forward, or optimizer.step() --> an error: not finalized (or: backward has raised)
//   kLaunched -- a gradient of any backward, too late for the average --> kLaunched, with an error; only
//                abort_iteration() leaves it
//   kBackward -- end of backward; gradients are missing --> kIncomplete
//   kIncomplete -- another synchronized backward, which may bring them --> kBackward
//   kIdle -- an exception ends a synchronized backward before its first gradient --> kIdle; nothing was sent
//   kBackward -- an exception ends backward --> kBackward still (kIdle if the post_scale callback has raised it)
//   kBackward -- next forward, or optimizer.step() --> an error: backward has not ended
//   kIncomplete -- next forward, or optimizer.step() --> an error that names the missing gradients
//   any -- abort_iteration() --> kIdle
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
// A worked example: two ranks, parameters 0, 1 and 2, bucket A = {2}, bucket B = {1, 0}, second iteration.
//
//   rank 0's gradients    rank 1's gradients    what happens (on each rank; on the CPU)
//   2: [4]                2: [8]                A is complete: packed as 4/2 and 8/2, and launched, since it is first
//   1: [1, 1]             1: [3, 5]             copied to B's buffer as [.5, .5] and [1.5, 2.5]; one is missing
//   0: [6]                0: [0]                B is complete: its buffer is [.5, .5, 3] here, [1.5, 2.5, 0] there
//   end of backward                             wait for A: 2 + 4, so gradient 2 becomes [6] on both; then for B:
//                                               gradients 1 and 0 become [2, 3] and [3]
//
// In the first iteration buckets are large. They leave together, when the last gradient has come: as with torch's
// class, which has one bucket then. If the graph does not tell how often each gradient arrives (reentrant
// checkpoints, several backwards, a static graph), they leave at the end of backward. The order of arrival is noted
// (support/trace.h). The first buckets follow the reverse order of registration. Before a later forward Python makes
// new ones (set_buckets), in rank 0's order of arrival on all ranks: once, or several times with
// bucket_cap_mb="auto". Not with find_unused_parameters, nor with a pinned plan.
//
// What always holds.
//  * Buckets are launched in index order, even when a later one is complete first: collectives of one group
//    must be issued in the same order on every rank, and the order of arrival differs from rank to rank. Out of
//    order, different buckets would be added up, or ranks would wait for each other for ever.
//  * From the second iteration on, a parameter that takes no part is marked ready when the iteration begins, if this
//    rank knows it then: from the backward's graph, or from a static graph's first iteration. Otherwise its bucket
//    would leave at the end of backward, after the collectives of other modules (a second wrapper, SyncBatchNorm). On
//    a rank that uses the parameter it leaves before them. So the order of collectives would differ between ranks.
//  * A rank sends its whole `.grad`. Earlier averages in it are equal on all ranks, so averaging keeps them.
//  * A mean is a sum and a division. For a mean Python sets `pre_scale` to 1/ranks. The division is part of packing:
//    that costs no pass over memory, and keeps half precision in range. `post_scale` is applied while unpacking. If
//    that factor is known only at the end of backward (a sum of weights over ranks), the callback `post_scale` gives
//    it.
//
// Threads. Hooks and the end-of-backward callback run on autograd's threads: the caller's for the CPU, one for each
// device otherwise. Several such threads run if parameters are on several devices, or if a program calls backward()
// in several threads. So whatever they call takes mutex_, and holds it while it waits for the collectives at the end
// of backward. finalize_backward_manual() takes it, too. Lock order: mutex_, then the GIL. Python callbacks run with
// mutex_ held and may call the reducer again, so mutex_ is recursive. Nobody may wait for mutex_ while holding the
// GIL. Most other functions take no lock: only the training thread calls them, or a hook that holds mutex_. The
// transport's threads write only time stamps, which are atomic. A Python thread reads this rank's position, to report
// it (bindings.cpp: position). It takes no lock, so its numbers may be old.
//
// reducer.cpp has what runs in an iteration; between_iterations.cpp has the rest.
#pragma once

#include "grad_hooks.h"
#include "state.h"
#include "support/trace.h"
#include "used_map.h"

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace minddp {

class OrderedAllreduce;
struct Quantization;
class ChangedModule;
class ProgramCollectives;
class SharedParameters;

// Fixed as long as the reducer lives.
struct ReducerOptions {
  GraphMode graph_mode = GraphMode::kAllUsed;
  std::vector<at::ScalarType> wire_dtypes;           // by parameter, what travels; kByte: blocks of codes
  std::shared_ptr<OrderedAllreduce> ordered;         // replaces the group's all-reduce; null: does not
  std::shared_ptr<const Quantization> quantization;  // cases/quantized_bucket.h
  bool warns_of_overflow = false;                    // cases/half_bucket.h
  bool gradient_as_bucket_view = false;              // cases/view_bucket.h
  bool lazy_bucket_allocation = false;               // cases/lazy_memory.h
  bool any_grad_dtype = false;        // mixed precision: parameters and gradients change dtype within an iteration
  bool refuses_earlier_sums = false;  // cases/earlier_sums.h
  bool always_reduce = false;         // use the process group even if it has one rank only
  std::string not_in_contexts;        // why gradients of distributed autograd are an error; if empty, none
};

// Called on autograd's threads, or on the thread that calls finalize_backward_manual(); on_stall() on each thread
// that waits. If one raises, backward or the finalizing call ends with its error. on_interrupted() is different: an
// exception has ended a backward already, so an error of its own becomes a warning.
struct ReducerCallbacks {
  std::function<void()> after_last_launch;  // after the last bucket and the used map; may issue collectives
  std::function<double()> post_scale;       // in place of the reducer's post_scale; called once before unpacking
  // A backward that brings gradients of `parameters` is adopted, and no sign in its graph says that it is the
  // wrapper's.
  std::function<void(const std::vector<size_t>& parameters)> on_adopted;
  std::function<void(const std::string& why)> on_interrupted;                             // see backward_is_gone()
  std::function<void(double seconds, size_t bucket, const std::string& error)> on_stall;  // support/watched_wait.h
};

class Reducer : public std::enable_shared_from_this<Reducer>, private ReducerState {
 public:
  using Buckets = std::vector<std::vector<size_t>>;  // parameter indices by bucket, in launch order

  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<bool> expect_sparse,
      c10::intrusive_ptr<c10d::ProcessGroup> group, ReducerOptions options, const Buckets& buckets);

  // --- in an iteration (reducer.cpp) ---

  // begin_forward() is called before a forward with gradients, end_forward() after it. A backward that reaches one of
  // `outputs`, or another node made between the two calls, is this forward's.
  void begin_forward();
  // For the trace: a step begins. `optimizer_ns`: how long optimizers' steps have taken so far. To be called before
  // any wait for other ranks.
  void arrive(int64_t optimizer_ns) { trace_->arrive(optimizer_ns); }
  void end_forward(const std::vector<at::Tensor>& outputs, bool synchronized);
  // For callers that decide when to synchronize. From this call until an iteration ends each backward synchronizes,
  // even one through a forward under no_sync.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  void on_ready(size_t index, const at::Tensor& contribution);  // the hook of parameter `index`
  // With manual_finalization: waits and unpacks, on the caller's current streams. To be called once for each
  // iteration, after its backward or from a hook in it. REQUIRES: ready_to_finalize().
  void finalize_backward_manual();
  bool ready_to_finalize() const {
    const bool all_launched = iteration.phase == Phase::kBackward && iteration.next_bucket == buckets.size();
    return (iteration.phase == Phase::kLaunched && !iteration.too_late) || all_launched;
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

  // --- between iterations (between_iterations.cpp) ---

  // A rank that has no backward of its own (join) sends an empty used map, and adds one to learned.iterations.
  // Returns the map's collective, to be waited for; null where there is none. In a static graph's first iteration it
  // waits itself.
  c10::intrusive_ptr<Future> shadow_used_map();
  // Makes new hooks on all parameters that require a gradient.
  void install_hooks();
  // Hooks for parameters that have another node. Does not bring back hooks that remove_hooks() has removed.
  void renew_hooks() {
    if (hooks_) hooks_->renew(parameters);
  }
  void remove_hooks() { hooks_.reset(); }
  // `before` is the older reducer of this module. Copies what it knows of the gradients that both reduce.
  void take_over(const Reducer& before);
  void set_buckets(const Buckets& buckets);  // REQUIRES: each parameter once, one dtype and device a bucket
  void release_buckets();
  void adopt_gradients();  // with gradient_as_bucket_view: turns existing gradients into views of the buffers
  void set_comm_hook(std::unique_ptr<CommHook> hook) { hook_ = std::move(hook); }
  void note_changed(const std::vector<at::Tensor>& changed, std::string why);  // cases/changed_module.h
  void share(const std::shared_ptr<Reducer>& other, bool views);               // cases/shared_parameters.h
  ProgramCollectives* program_collectives() { return program_collectives_; }   // cases/program_collectives.h
  // Raises if an iteration has begun and is not over. Inside of a backward it raises in kLaunched alone: in other
  // phases this backward may still complete the iteration.
  void check_finished() const;

  ReducerCallbacks& callbacks() { return callbacks_; }
  // Set between iterations.
  bool sync_enabled = true;             // the program is outside of no_sync now; for a forward see end_forward()
  bool optimizer_in_backward = false;   // a communication hook runs the optimizer, so nothing is unpacked
  bool skip_all_reduce_unused = false;  // the caller promises that ranks leave the same buckets unused
  bool manual_finalization = false;     // the caller waits and unpacks; set while no backward is expected
  double pre_scale = 1.0, post_scale = 1.0;

  const ReducerState& state() const { return *this; }
  const Trace& trace() const { return *trace_; }
  bool graph_is_static() const { return graph_is_static_; }  // the same parameters were missing every time
  std::vector<size_t> missing() const;                       // in this iteration
  // A synchronized forward has no backward yet, or its iteration is not over.
  bool expects_backward() const { return iteration.phase != Phase::kIdle || forwards.awaits_backward(); }
  // A synchronized backward runs, or its averages are waited for. Known once it has reached a watched output or a
  // gradient.
  bool in_backward() const { return finalizing_ || (!backward.graph_tasks.empty() && backward.is_synchronized()); }
  bool averaged_since(size_t index, int backward) const {
    return iteration.phase == Phase::kIdle && !used_map_.used_nowhere(index) &&
        grads.averaged_since(index, backward, parameters[index].grad());
  }
  std::vector<int32_t> used_map() {  // how many ranks used each parameter; without a map: 1 if this one did
    std::vector<int32_t> map = used_map_.sum(for_used_map());
    map.resize(parameters.size());
    return map;
  }

 private:
  bool has_recorded() const { return learned.iterations > 0; }
  std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>& indices) const;
  void watch(const std::vector<at::Tensor>& outputs, bool synchronized);
  void enter_backward(std::optional<bool> through_synchronized_forward);
  void tell_of_adopted() const;
  void foresee(bool is_its_own);
  void await_end_of(int graph_task);
  void begin_iteration();
  void mark_variable_ready(size_t index, const at::Tensor& contribution);
  void gradient_grew(size_t index, const at::Tensor& contribution);
  void take(size_t index, const at::Tensor& contribution);
  void pack(size_t index, const at::Tensor& contribution);
  bool skips(size_t index) const;
  void launch(size_t index);
  void launch_or_skip(size_t index);
  void finish_backward(int graph_task);
  void backward_is_gone(int graph_task);
  void launch_rest(int graph_task);
  void finalize_backward();
  void unpack(size_t index, double scale, const std::vector<int32_t>& used);
  double scale_of_results();
  void end_iteration();
  void send_used_map() {
    iteration.used_map_sent = true;
    used_map_.send(*group_, grads.used, iteration.grown, parameters[0].device());
  }
  Wait for_used_map() {
    return [this](Future& future) { wait(future, buckets.size()); };
  }
  void wait(Future& future, size_t bucket);

  Bucket::Packing packing(const at::Tensor& contribution) const {
    return {pre_scale, may_grow(), grads.used, contribution};
  }
  // True while nobody knows how often a gradient arrives: in the first iteration, and from an adopted backward to the
  // end of its iteration, unless their graph tells. While it is true, no bucket leaves before the end of backward, so
  // a gradient that grows can be packed again.
  bool may_grow() const { return (!has_recorded() && !iteration.each_once) || iteration.sends_at_the_end; }
  // In the first iteration torch's class has one bucket, unless it looks for unused parameters.
  bool waits_for_all() const {
    return !has_recorded() && used_map_.mode() != GraphMode::kFindUnused &&
        !std::ranges::all_of(buckets, [](const auto& bucket) { return bucket->complete(); });
  }
  bool alone() const { return group_->getSize() == 1 && !options_.always_reduce; }
  // One rank, and nothing needs the buffer: the gradients are the result already.
  bool passes_through() const {
    return alone() && !hook_ && !callbacks_.post_scale && pre_scale == 1.0 && post_scale == 1.0 &&
        !options_.gradient_as_bucket_view && !any_cast_ && !any_sparse_ && !manual_finalization;
  }
  std::unique_lock<std::recursive_mutex> guard() { return std::unique_lock(mutex_); }

  const std::vector<bool> expect_sparse_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const bool any_sparse_;
  const ReducerOptions options_;
  const bool any_cast_;  // gradients do not travel as they are
  ReducerCallbacks callbacks_;
  std::vector<std::unique_ptr<Case>> cases_;
  SharedParameters* shared_ = nullptr;                 // owned by cases_; null before share()
  ChangedModule* changed_ = nullptr;                   // the same; null before note_changed()
  ProgramCollectives* program_collectives_ = nullptr;  // the same; null where buckets are torch's anyway
  std::unique_ptr<CommHook> hook_;
  std::unique_ptr<GradHooks> hooks_;

  std::recursive_mutex mutex_;  // guards all that runs in a backward
  size_t turn_ = 0;             // whose hook was looked at last
  bool finalizing_ = false;     // the last node of a synchronized backward has run, and its averages are waited for
  bool graph_is_static_ = true;
  std::vector<size_t> last_missing_;
  std::vector<std::pair<size_t, size_t>> place_;  // by parameter: bucket, slot
  UsedMap used_map_;
  std::vector<c10::intrusive_ptr<Future>> extra_futures_;
  std::shared_ptr<Trace> trace_;  // shared with the collectives' completion callbacks
};

}  // namespace minddp
