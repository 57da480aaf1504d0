// Case: wire="fp16". Gradients travel as float16, and say so once where that is too small for them.
#pragma once

#include "reducer/events.h"

#include <algorithm>

namespace minddp {

class HalfBucket : public Bucket {
 public:
  using Bucket::Bucket;
  void unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) override {
    if (!warned_ && (warned_ = has_infinity(result))) warn(result);
    Bucket::unpack(result, scale, used);
  }

 private:
  static constexpr uint16_t kMagnitude = 0x7fff, kInfinity = 0x7c00;
  static bool has_infinity(const at::Tensor& half) { return at_infinity(half) < half.numel(); }
  // The first place that holds an infinity.
  static int64_t at_infinity(const at::Tensor& half) {
    const auto* bits = static_cast<const uint16_t*>(half.const_data_ptr());
    for (int64_t begin = 0; begin < half.numel(); begin += 4096) {
      const int64_t end = std::min(begin + 4096, half.numel());
      bool any = false;
      for (int64_t i = begin; i < end; ++i) any |= (bits[i] & kMagnitude) == kInfinity;
      if (any) return std::find_if(bits + begin, bits + end, is_infinity) - bits;
    }
    return half.numel();
  }
  static bool is_infinity(uint16_t bits) { return (bits & kMagnitude) == kInfinity; }
  void warn(const at::Tensor& half) const {
    const int64_t place = at_infinity(half);
    const auto slot = std::ranges::find_if(
        *slots_, [&](const Slot& s) { return place >= s.offset && place < s.offset + s.parameter.numel(); });
    TORCH_WARN("[Rank ", options_.rank, "] DistributedDataParallel(wire=\"fp16\"): the averaged gradient of '",
        slot->name,
        "' is infinite. Either a rank's own gradient was, or it is too large for float16 (65504): use "
        "wire=\"bf16\", or a smaller loss scale. Said once for a bucket.");
  }

  bool warned_ = false;
};

class HalfBuckets : public Case {
 public:
  std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>& indices, Bucket::Options& options) override {
    const bool casts = options.buffer_dtype != state().parameters[indices[0]].scalar_type();
    if (options.buffer_dtype != at::kHalf || !casts) return nullptr;
    return std::make_unique<HalfBucket>(indices, state().parameters, state().names, options);
  }
};

}  // namespace minddp
