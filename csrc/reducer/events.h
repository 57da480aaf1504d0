// The seam: what a companion can attach to the reducer, and the points at which the reducer calls it.
//
// The core averages dense gradients. What only some programs need is a Case, which a companion defines and registers
// with Reducer::add() before the first buckets are made. The reducer calls its cases in the order of registration,
// and knows none of them by name. Every point has an empty default, so a case overrides what it needs.
//
// Threads. If nothing else is said, a point is called with the reducer's mutex held, on the thread that runs backward
// or forward, without the GIL. An exception ends that backward or forward with its error. Only kLastLaunch and
// scale_of_results() may issue collectives: all ranks call them at the same place.
#pragma once

#include "bucket.h"
#include "forwards.h"
#include "iteration.h"
#include "used_map.h"

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace minddp {

// Fixed as long as the reducer lives.
struct ReducerOptions {
  GraphMode graph_mode = GraphMode::kAllUsed;
  std::vector<at::ScalarType> wire_dtypes;  // by parameter, what travels; empty: each parameter's own
  bool always_reduce = false;               // use the process group even if it has one rank only
};

// What cases see, and may change.
struct ReducerState {
  const std::vector<at::Tensor> parameters;
  const std::vector<std::string> names;
  const c10::intrusive_ptr<c10d::ProcessGroup> group;
  const ReducerOptions options;
  const int rank = group->getRank();

  Forwards forwards;
  Backward backward;
  Iteration iteration{parameters.size()};
  Learned learned{parameters.size()};
  UsedMap used_map{options.graph_mode, is_alone()};
  std::vector<std::unique_ptr<Bucket>> buckets;
  // By parameter: 1 if its hook has run with a defined `.grad` since the last synchronization, in any backward.
  // (torch's local_used_map.)
  std::vector<int32_t> used = std::vector<int32_t>(parameters.size(), 0);
  // By parameter: the number of the last backward that brought its gradient and did not bypass the wrapper; or -1.
  // A backward's number is its graph task's. Numbers increase, and all wrappers see the same ones.
  std::vector<int> arrived_in = std::vector<int>(parameters.size(), -1);
  bool sync_enabled = true;  // the program is outside of no_sync now; for a forward see Reducer::end_forward()
  mutable std::string last_error;

  // Nothing is sent.
  bool is_alone() const { return group->getSize() == 1 && !options.always_reduce; }
  // The running backward's gradient of this parameter counts as bypassing the wrapper: no average replaces it, and it
  // may differ between ranks. A backward under no_sync is local in any case: the program has asked for that.
  bool bypasses(size_t index) const {
    if (backward.is_synchronized()) return false;
    return used_map.used_nowhere(index) || (backward.origin == Origin::kBypassed && sync_enabled);
  }
  // Keeps the text: a program may catch the error inside of backward, and others ask later why this rank is missing.
  [[noreturn]] void fail(const std::string& message) const {
    last_error = message;
    TORCH_CHECK(false, message);
  }
};

// A gradient that has come, as the core sees it; a case may correct it.
struct ArrivedGradient {
  const size_t index;
  const at::Tensor& contribution;  // undefined: none
  bool defined;                    // there is a gradient now
  bool in_grad = true;             // it is in `.grad`
};

enum class Moment {
  kNewBuckets,  // set_buckets() has made them
  kForwardBegin,
  kForwardEnd,
  kBackward,        // a backward's first notice; its origin is known
  kIterationBegin,  // the first gradient of a synchronized backward has come; nothing is packed
  kBackwardEnd,     // of a synchronized backward
  kLastLaunch,      // the last bucket and the used map have left; a case may issue collectives
  kFinalizing,      // finalize_backward_manual() is called
  kAveraged,        // the iteration is over
  kGivenUp,         // abort_iteration() has ended it
};

enum class BucketMoment {
  kReady,     // its last gradient has come
  kPack,      // its gradients are about to be copied into its buffer
  kLaunch,    // its collective is about to begin
  kLaunched,  // and has begun
  kUnpack,    // it has ended; the averages are about to be written
  kUnpacked,  // they are
};

class Case {
 public:
  virtual ~Case() = default;

  virtual void on(Moment) {}
  virtual void on(BucketMoment, size_t /*bucket*/) {}

  // --- buckets

  // Makes a bucket of another kind, or returns null: then the next case is asked, and at last the core. A case may
  // also change the options, for the cases behind it.
  virtual std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>& /*indices*/, Bucket::Options&) {
    return nullptr;
  }
  // In place of the process group's all-reduce, below a communication hook. Empty: the next case is asked.
  virtual std::optional<Flight> all_reduce(Bucket&, const at::Tensor& /*buffer*/, const Wait&) { return {}; }
  // Gradients must pass through the buckets even on a single rank.
  virtual bool needs_buckets() const { return false; }

  // --- a backward

  // The running backward's origin has been found, which a case may change: at its first notice, and once more if it
  // turns out to be synchronized.
  virtual void on_origin(Forwards::Answer&) {}
  // before_accumulation() is called on cases that need it: autograd is about to add to `.grad`.
  virtual bool needs_before_accumulation() const { return false; }
  virtual void before_accumulation(size_t /*index*/) {}
  // The next three are called on cases that follow gradients: for thousands of gradients, each call counts.
  virtual bool follows_gradients() const { return false; }
  // A gradient has come, of any backward; nothing has been done about it.
  virtual void on_gradient(ArrivedGradient&) {}
  // It is in `.grad`, and has been noted.
  virtual void after_accumulation(size_t /*index*/) {}
  // It counts as an arrival of this iteration.
  virtual void on_arrival(size_t /*index*/) {}

  // --- the end of an iteration

  // The factor of all results, in place of the reducer's post_scale. Empty: the next case is asked. It may wait for
  // other ranks. If it raises on all ranks, the iteration is given up.
  virtual std::optional<double> scale_of_results() { return {}; }
  // The averages of this bucket's parameters with used[index] != 0 have been written: between its kUnpack and its
  // kUnpacked. Not if the optimizer runs in backward, nor on a rank alone whose gradients need no buckets.
  virtual void averages_written(const Bucket&, const std::vector<int32_t>& /*used*/) {}

  // --- exceptions and waits

  // An exception has ended a backward. `owes`: the other ranks expect its averages. What is raised here becomes a
  // warning, since backward has an error of its own.
  virtual void on_interrupted(int /*graph_task*/, bool /*owes*/) {}
  // on_stall() is called while the reducer waits for a collective (see OnStall), on the thread that waits, if the
  // case watches(). A `bucket` behind the last one is the used map, or another collective at the end of backward.
  virtual bool watches() const { return false; }
  virtual void on_stall(double /*seconds*/, size_t /*bucket*/, const std::string& /*error*/) {}

  // `before` is a case of this module's older reducer; parameter i is number there[i] in it, or -1: not in it.
  virtual void take_over(const Case& /*before*/, const std::vector<int64_t>& /*there*/, bool /*same_group*/) {}

 protected:
  ReducerState& state() const {
    TORCH_CHECK(
        state_ != nullptr, "a case of a reducer is used before it is added to one, or after the reducer's end");
    return *state_;
  }

 private:
  friend class Reducer;
  ReducerState* state_ = nullptr;
};

// The index in `others` of each of `tensors`, or -1.
inline std::vector<int64_t> indices_in(
    const std::vector<at::Tensor>& others, const std::vector<at::Tensor>& tensors) {
  std::unordered_map<const at::TensorImpl*, int64_t> found;
  for (const at::Tensor& t : others) found.emplace(t.unsafeGetTensorImpl(), found.size());
  std::vector<int64_t> indices;
  for (const at::Tensor& t : tensors) {
    auto it = found.find(t.unsafeGetTensorImpl());
    indices.push_back(it == found.end() ? -1 : it->second);
  }
  return indices;
}

}  // namespace minddp
