// The reducer: averages gradients over ranks while backward still makes them.
//
// Overview. Parameters' gradients are grouped into buckets. A hook on every parameter tells when its
// gradient is whole; the bucket whose last gradient that was is packed and, once all buckets before
// it are on their way, handed to the process group. At the end of backward the reducer waits for the
// collectives, bucket by bucket, and writes the averages to `.grad`.
//
// Life of an iteration (enum Phase):
//
//      kIdle ──first gradient, or backward reaches an output──▶ kBackward
//      kBackward ──end of backward, every gradient came, or absence is allowed──▶ kIdle
//      kBackward ──end of backward, gradients missing──▶ kIncomplete
//      kIncomplete ──another backward brings the missing ones──▶ kBackward
//      kIncomplete ──next forward or optimizer.step()──▶ error, naming them
//
// A backward under no_sync leaves the phase kIdle; it only notes which parameters it used.
//
// What always holds.
//  * Buckets are launched in index order, even when a later one is complete first: collectives of
//    one group must be issued in the same order on every rank, and arrival order differs by rank.
//  * The first synchronized backward launches nothing before its end. It records the order of
//    arrival (for re-planning) and the number of arrivals per parameter (see param_usage.h).
//  * What a rank sends for a parameter is its whole `.grad`: averages of earlier backwards in it are
//    the same on all ranks, and averaging leaves them as they are.
//
// Threads. Hooks and the end-of-backward callback run on autograd's threads, one at a time unless
// parameters live on several devices; only then `mutex_` is used. Lock order: `mutex_`, then the
// GIL (a Python hook is called with `mutex_` held), so nobody may hold the GIL while asking for
// `mutex_`. Everything else: REQUIRES that no backward is running.
#pragma once

#include "bucket.h"
#include "bucket_assignment.h"
#include "comm_hook.h"
#include "grad_hooks.h"
#include "param_usage.h"
#include "ready_order.h"
#include "trace.h"

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace minddp {

enum class Phase { kIdle, kBackward, kIncomplete };

// How a parameter without a gradient at the end of backward is taken.
enum class GraphMode {
  kAllUsed,     // an error, unless a further backward brings it
  kFindUnused,  // fine; used on no rank: .grad stays; used on some: it counts as zero here
  kStatic,      // as kFindUnused, decided once in the first iteration
};

enum class Reduction { kMean, kSum, kWeighted };

struct ReducerOptions {
  GraphMode graph_mode = GraphMode::kAllUsed;
  Reduction reduction = Reduction::kMean;
  double predivide_factor = 0;                   // 0: divide by the whole divisor before the sum
  std::optional<at::ScalarType> reduce_dtype;    // what travels; empty: the gradients' own
  bool gradient_as_bucket_view = false;
  bool skip_all_reduce_unused = false;           // the same parameters are unused on every rank
  bool average_in_collective = false;            // the backend has AVG (NCCL)
  BucketCaps caps;
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // `expect_sparse[i]`: parameter i's gradient is sparse. `buckets`: the first assignment.
  Reducer(
      std::vector<at::Tensor> parameters,
      std::vector<std::string> names,
      std::vector<bool> expect_sparse,
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      ReducerOptions options);

  // Hooks need shared_from_this, so they are installed after construction.
  void install_hooks();
  void remove_hooks() { hooks_.reset(); }

  // --- around forward ---
  // Raises when the backward before left gradients un-averaged.
  void check_finished() const;
  void note_forward_begin() { trace_->step(StepEvent::kForwardBegin); }
  // Backward starts where it reaches one of forward's outputs.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);

  // --- called by hooks ---
  void on_ready(size_t index);

  // --- buckets ---
  // Collective, once: cuts buckets along rank 0's observed order. False when nothing was to be done.
  bool rebuild_buckets();
  void set_buckets(const std::vector<std::vector<size_t>>& buckets);
  void release_buckets();
  const std::vector<Bucket>& buckets() const { return buckets_; }
  bool has_rebuilt() const { return rebuilt_; }
  ReadyOrder::Order observed_order() const { return order_.order(); }
  // A joined rank never sees a backward of its own: it takes part in the re-planning all the same.
  void assume_order_recorded() { order_recorded_ = true; }

  // --- the reduction ---
  void set_comm_hook(std::unique_ptr<CommHook> hook);
  bool has_comm_hook() const { return hook_ != nullptr; }
  void set_reduce_dtype(std::optional<at::ScalarType> dtype);
  void set_static_graph() { options_.graph_mode = GraphMode::kStatic; }
  void set_divisor(int64_t divisor) { divisor_ = divisor; }
  void set_sync_enabled(bool enabled) { sync_enabled_ = enabled; }
  bool sync_enabled() const { return sync_enabled_; }
  void set_optimizer_in_backward() { optimizer_in_backward_ = true; }
  void set_process_group(c10::intrusive_ptr<c10d::ProcessGroup> group);
  void reset();
  void add_weight(double weight);
  // Waited for at the end of the next synchronized backward.
  void add_post_backward_future(c10::intrusive_ptr<Future> future) { extra_futures_.push_back(std::move(future)); }
  // Called about once a second while a collective does not end; may raise.
  void set_stall_handler(std::function<void(double seconds, size_t bucket)> handler) { on_stall_ = std::move(handler); }

  // What the reducer does without a hook, for hooks that wrap it.
  c10::intrusive_ptr<Future> run_allreduce(const GradBucket& bucket);
  c10::intrusive_ptr<Future> run_hook(GradBucket& bucket);
  // Zeros in the shape of bucket `index`: what a rank without data contributes.
  GradBucket zero_bucket(size_t index) const;
  // All of a backward's collectives with zeros (a rank that ran out of data).
  void shadow_backward();

  // --- facts ---
  Phase phase() const { return phase_; }
  const ReducerOptions& options() const { return options_; }
  const ParamUsage& usage() const { return usage_; }
  std::vector<size_t> missing() const;
  const Trace& trace() const { return *trace_; }
  const std::string& last_error() const { return last_error_; }
  // Whether the same parameters were missing in every synchronized backward so far.
  bool graph_is_static() const { return graph_is_static_; }
  // By parameter, the number of ranks on which it was used, as of the last synchronization.
  at::Tensor used_map();
  const std::vector<std::string>& names() const { return names_; }

 private:
  // Backward.
  void on_backward_begins();
  void begin_backward();
  void mark_variable_ready(size_t index);
  void gradient_grew(size_t index);
  void launch_ready_buckets();
  void pack(size_t index);
  void launch(size_t index);
  void finish_backward();
  void finalize_backward();

  // Pieces of finalize.
  void launch_all_buckets();
  void launch_used_map();
  std::vector<int32_t> globally_used();
  void launch_weight();
  double post_scale();
  void wait(Future& future, size_t bucket);
  at::Tensor reduced(size_t index);
  void end_iteration();

  [[noreturn]] void fail(const std::string& message) const;
  bool unused_is_fine() const { return options_.graph_mode != GraphMode::kAllUsed; }
  bool known_unused(size_t index) const { return !static_used_.empty() && !static_used_[index]; }
  double pre_scale() const;
  bool sends_used_map() const;
  void make_buckets(const std::vector<std::vector<size_t>>& assignment);
  std::vector<ParameterInfo> parameter_infos() const;
  std::vector<std::vector<size_t>> assign(const ReadyOrder::Order& order) const;
  at::Device device() const { return parameters_[0].device(); }

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const std::vector<bool> expect_sparse_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  ReducerOptions options_;
  int64_t divisor_;
  std::unique_ptr<CommHook> hook_;
  std::unique_ptr<GradHooks> hooks_;
  std::function<void(double, size_t)> on_stall_;

  const bool several_threads_;  // parameters on several devices: hooks run side by side
  std::mutex mutex_;            // used only when several_threads_
  Phase phase_ = Phase::kIdle;  // GUARDED_BY(mutex_), as all that follows
  bool sync_enabled_ = true;
  bool order_recorded_ = false; // the first synchronized backward is over
  bool rebuilt_ = false;
  bool optimizer_in_backward_ = false;
  bool graph_is_static_ = true;
  std::vector<size_t> last_missing_;
  mutable std::string last_error_;

  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;  // parameter -> bucket
  size_t next_bucket_ = 0;         // first bucket that is not launched
  ParamUsage usage_;
  ReadyOrder order_;
  std::vector<int32_t> static_used_;  // kStatic after the first iteration: used on some rank
  c10::intrusive_ptr<Future> used_map_;
  at::Tensor used_map_tensor_;
  std::optional<double> weight_;
  c10::intrusive_ptr<Future> weight_future_;
  at::Tensor weight_tensor_;
  std::vector<c10::intrusive_ptr<Future>> extra_futures_;
  std::shared_ptr<Trace> trace_;   // shared with the collectives' completion callbacks
};

}  // namespace minddp
