// What it means that a gradient is missing at the end of backward.
//
// If that is allowed, ranks must agree on which parameters any rank used. They add their maps after the last bucket.
// Every rank joins this sum. The result is read just before the first bucket whose unpacking needs it. Every rank
// waits for it before the iteration ends.
#pragma once

#include "wait.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <vector>

namespace minddp {

// What it means that backward has not reached a parameter, or has brought no gradient to it.
enum class GraphMode {
  kAllUsed,     // not reached: an error, unless a further backward does; no gradient: it counts as zero
  kFindUnused,  // allowed. If no rank used the parameter, `.grad` stays as it was. If some rank did, a missing
                // `.grad` counts as zero
  kStatic,      // as kFindUnused at first; from then on, what was used in the first iteration must come
};

class UsedMap {
 public:
  using Map = std::vector<int32_t>;  // by parameter: 0 where it was not used
  UsedMap(GraphMode mode, bool alone) : mode_(mode), nothing_to_agree_on_(alone || mode == GraphMode::kAllUsed) {}

  GraphMode mode() const { return mode_; }
  bool decided() const { return decided_; }  // kStatic, after the first iteration
  bool absence_is_fine() const { return mode_ != GraphMode::kAllUsed && !decided(); }
  // kStatic, after the first iteration: this rank had no gradient of it there, and its backward did not reach it. A
  // rank that had no backward there uses the other ranks' maps (follow()).
  bool known_unused(size_t index) const { return decided() && !static_here_[index]; }
  // kStatic, after the first iteration: no rank had a gradient of it then, not even one that a hook removed.
  bool used_nowhere(size_t index) const { return decided() && !static_any_[index]; }

  // Starts the sum of `local`, if one is needed. `accumulated`: nonzero if backward brought a gradient. A static
  // graph sends both as one map, `local` first. Nothing here waits for `device`.
  void send(c10d::ProcessGroup& group, const Map& local, const std::vector<char>& accumulated, at::Device device) {
    flight_ = {};
    sent_ = local;
    if (mode_ == GraphMode::kStatic) sent_.insert(sent_.end(), accumulated.begin(), accumulated.end());
    if (is_settled()) return;
    RECORD_FUNCTION("minddp::search_unused_parameters", std::vector<c10::IValue>());
    // The memory is pinned: otherwise the host would wait for the copy.
    sum_ = at::tensor(sent_, at::dtype(at::kInt).pinned_memory(!device.is_cpu())).to(device, /*non_blocking=*/true);
    flight_ = all_reduce(group, sum_);
  }
  // Waits for the sum, even if this rank does not need it: if its process ended now, another rank would not get this
  // rank's map. On a device the current stream waits.
  void join(const Wait& wait) const {
    if (!flight_.future) return;
    wait(*flight_.future);
    if (!sum_.device().is_cpu()) order_streams(*flight_.work);
  }
  void forget() { flight_ = {}; }
  // The last send's future; null if nothing was sent.
  c10::intrusive_ptr<Future> future() const { return flight_.future; }
  // The sum over ranks of what was sent last. If no sum was needed: what this rank would have sent.
  Map sum(const Wait& wait) const {
    if (!flight_.future) return sent_;
    join(wait);
    at::Tensor map = sum_.cpu();
    return {map.const_data_ptr<int32_t>(), map.const_data_ptr<int32_t>() + map.numel()};
  }
  // Whether the global map can differ from `local` for this bucket.
  bool matters_to(const auto& slots, const Map& local) const {
    if (mode_ != GraphMode::kFindUnused) return true;
    return std::ranges::any_of(slots, [&](const auto& slot) { return !local[slot.index]; });
  }
  // Nonzero for parameters whose gradient some rank has, at the end of a synchronized backward. `arrivals`: how often
  // backward reached each parameter here. May wait for the other ranks' maps, and throw.
  Map globally_used(const Map& local, const Map& arrivals, const Wait& wait) {
    if (mode_ == GraphMode::kAllUsed) return Map(local.size(), 1);
    if (mode_ == GraphMode::kFindUnused) return std::ranges::count(local, 0) ? sum(wait) : local;
    if (!decided()) {
      learn(wait);
      for (size_t i = 0; i < local.size(); ++i) static_here_.push_back(local[i] + arrivals[i]);
      decided_ = true;
    }
    if (!hooks_remove_) return static_used_;
    Map used = sum(wait);
    for (size_t i = 0; i < local.size(); ++i) used[i] = static_used_[i] || (used[i] && static_any_[i]);
    return used;
  }
  // kStatic: a rank without a backward in the first iteration takes the others' map for its own.
  void follow(const Wait& wait) {
    if (decided() || mode_ != GraphMode::kStatic) return;
    learn(wait);
    static_here_ = static_any_;
    decided_ = true;
  }

 private:
  // No rank needs another rank's map. With hooks_remove_ ranks need the maps in every iteration: a gradient that
  // hooks removed on every rank in the first one may stay on some rank later.
  bool is_settled() const { return nothing_to_agree_on_ || (decided() && !hooks_remove_); }
  // From the first iteration's sum.
  void learn(const Wait& wait) {
    const Map both = sum(wait);
    const auto accumulated = both.begin() + both.size() / 2;
    static_used_.assign(both.begin(), accumulated);
    static_any_.assign(accumulated, both.end());
    for (size_t i = 0; i < static_any_.size(); ++i) {
      hooks_remove_ |= static_any_[i] && !static_used_[i];
      static_any_[i] |= static_used_[i];
    }
  }

  const GraphMode mode_;
  const bool nothing_to_agree_on_;
  std::atomic<bool> decided_ = false;  // set once the maps below are there: another thread may read them
  // kStatic, from the first iteration, nonzero where:
  Map static_used_;            // some rank had a gradient
  Map static_any_;             // the same, or had one that a hook removed from `.grad`
  Map static_here_;            // this rank had one, or backward reached it
  bool hooks_remove_ = false;  // for some parameter, hooks removed the gradient on every rank that had one
  Map sent_;
  at::Tensor sum_;
  Flight flight_;
};

}  // namespace minddp
