// What it means that a gradient is missing at the end of backward.
//
// Where that is allowed, ranks must agree on which parameters some rank used: one small sum after the last bucket.
// Every rank comes to that place, whatever it used. Its result is read before the first bucket to which it matters is
// unpacked; every rank waits for it at the end.
#pragma once

#include "transport/allreduce.h"
#include "wait.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <vector>

namespace minddp {

// How a parameter without a gradient at the end of backward is taken.
enum class GraphMode {
  kAllUsed,     // an error, unless a further backward brings it
  kFindUnused,  // fine. Used on no rank: .grad stays as it was. Used on some: where there is no `.grad` here, it
                // counts as zero
  kStatic,      // as kFindUnused at first; from then on, what was used in the first iteration must come
};

class UsedMap {
 public:
  using Map = std::vector<int32_t>;  // by parameter: 0 where it was not used
  UsedMap(GraphMode mode, bool alone) : mode_(mode), nothing_to_agree_on_(alone || mode == GraphMode::kAllUsed) {}

  GraphMode mode() const { return mode_; }
  bool decided() const { return decided_; }  // kStatic, after the first iteration
  bool absence_is_fine() const { return mode_ != GraphMode::kAllUsed && !decided(); }
  // kStatic, after the first iteration: this rank had no gradient of it then, and backward did not come to it.
  bool known_unused(size_t index) const { return decided() && !static_here_[index]; }
  // known_unused(); or backward reached it but gave None, and no rank got a gradient. (One that a hook took from
  // `.grad` is a gradient.)
  bool gets_no_gradient(size_t index) const { return known_unused(index) || (decided() && !static_any_[index]); }

  // Returns when the collective, if there is to be one, is on its way; nothing here waits for `device`.
  void send(c10d::ProcessGroup& group, const Map& local, at::Device device) {
    flight_ = {};
    if (nothing_to_agree_on_ || decided()) return;
    RECORD_FUNCTION("minddp::search_unused_parameters", std::vector<c10::IValue>());
    // From pinned memory: else the host waits until it has been read.
    sum_ = at::tensor(local, at::dtype(at::kInt).pinned_memory(!device.is_cpu())).to(device, /*non_blocking=*/true);
    flight_ = allreduce(group, sum_, /*wait=*/nullptr);
  }
  // Before backward returns: another rank may need this one's map, and this process may be about to end. On a device
  // the current stream waits.
  void join(const Wait& wait) const {
    if (!flight_.future) return;
    wait(*flight_.future);
    if (!sum_.device().is_cpu()) order_streams(*flight_.work);
  }
  void forget() { flight_ = {}; }
  // Of the last send; null where nothing was sent.
  c10::intrusive_ptr<Future> future() const { return flight_.future; }
  // The sum over ranks as of the last send; this rank's own map where none was sent.
  Map sum(const Map& local, const Wait& wait) const {
    if (!flight_.future) return local;
    join(wait);
    at::Tensor map = sum_.cpu();
    return {map.const_data_ptr<int32_t>(), map.const_data_ptr<int32_t>() + map.numel()};
  }
  // Whether globally_used() may say of a bucket's parameters what `local` does not.
  bool matters_to(const auto& slots, const Map& local) const {
    if (mode_ != GraphMode::kFindUnused) return true;
    return std::ranges::any_of(slots, [&](const auto& slot) { return !local[slot.index]; });
  }
  // Nonzero for parameters whose gradient some rank has, at the end of a synchronized backward. `arrivals`: how often
  // backward came to each here, with a gradient or without; `grown`: nonzero where with one. `sum()` waits for the
  // other ranks' maps, and may throw.
  Map globally_used(const Map& local, const Map& arrivals, const std::vector<char>& grown, const auto& sum) {
    if (mode_ == GraphMode::kAllUsed) return Map(local.size(), 1);
    if (mode_ == GraphMode::kFindUnused) return std::ranges::count(local, 0) ? sum() : local;
    if (!decided()) {
      static_used_ = static_any_ = sum();
      for (size_t i = 0; i < local.size(); ++i) {
        static_here_.push_back(local[i] + arrivals[i]);
        static_any_[i] |= grown[i];
      }
      decided_ = true;
    }
    Map used = static_used_;  // a hook that took the gradient then may leave it now
    for (size_t i = 0; i < local.size(); ++i) used[i] |= local[i] && static_any_[i];
    return used;
  }
  // kStatic, on a rank without a backward of its own in the first iteration: it is taken to use what others do.
  void follow(const Wait& wait) {
    if (decided() || mode_ != GraphMode::kStatic) return;
    static_here_ = static_used_ = static_any_ = sum({}, wait);
    decided_ = true;
  }

 private:
  const GraphMode mode_;
  const bool nothing_to_agree_on_;
  std::atomic<bool> decided_ = false;  // set once the maps below are there: another thread may read them
  // kStatic, from the first iteration, nonzero where:
  Map static_used_;  // some rank had a gradient
  Map static_any_;   // the same, or autograd has added one here that a hook took from `.grad`
  Map static_here_;  // this rank had one, or backward came to it
  at::Tensor sum_;
  Flight flight_;
};

}  // namespace minddp
