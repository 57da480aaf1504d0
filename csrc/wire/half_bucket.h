// Case: wire="fp16". Gradients travel as float16, and that is said once where a sum is too large for it.
#pragma once

#include "reducer/events.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace minddp {

class HalfBucket : public Bucket {
 public:
  using Bucket::Bucket;
  void unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) override {
    // A hook's result need not be of float16.
    if (!overflowed && result.scalar_type() == at::kHalf) overflowed = !is_finite(result);
    Bucket::unpack(result, scale, used);
  }

  bool overflowed = false;  // a result was not finite: of infinities of both signs the sum is NaN

 private:
  static bool is_finite(const at::Tensor& half) {
    constexpr uint16_t kMagnitude = 0x7fff, kInfinity = 0x7c00;
    const auto* bits = static_cast<const uint16_t*>(half.const_data_ptr());
    bool any = false;
    for (int64_t begin = 0; begin < half.numel() && !any; begin += 4096)
      for (int64_t i = begin; i < std::min(begin + 4096, half.numel()); ++i)
        any |= (bits[i] & kMagnitude) >= kInfinity;
    return !any;
  }
};

class HalfBuckets : public Case {
 public:
  std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>& indices, Bucket::Options& options) override {
    const bool casts = options.buffer_dtype != state().parameters[indices[0]].scalar_type();
    if (options.buffer_dtype != at::kHalf || !casts) return nullptr;
    return std::make_unique<HalfBucket>(indices, state().parameters, state().names, options);
  }
  void on(Moment moment) override {
    if (moment != Moment::kAveraged || said_) return;
    for (const auto& bucket : state().buckets)
      if (const auto* half = dynamic_cast<const HalfBucket*>(bucket.get()); half && half->overflowed)
        return say(*half);
  }

 private:
  void say(const HalfBucket& bucket) {
    said_ = true;
    const auto slot = std::ranges::find_if(*bucket.slots(),
        [](const Bucket::Slot& s) { return s.grad().defined() && !s.grad().isfinite().all().item<bool>(); });
    TORCH_WARN("[Rank ", state().rank, "] DistributedDataParallel(wire=\"fp16\"): the averaged gradient of '",
        slot == bucket.slots()->end() ? "a parameter" : slot->name,
        "' is not finite. Either a rank's own gradient was not, or it or the ranks' sum is too large for float16 "
        "(65504): ",
        "use wire=\"bf16\", or a smaller loss scale. Said once.");
  }

  bool said_ = false;
};

}  // namespace minddp
