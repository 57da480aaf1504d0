// Which gradients travel together.
//
// A bucket is the unit of communication: one flat buffer, one collective. Large buckets pay the
// collective's latency rarely; small ones let communication begin while backward still runs. This
// unit turns sizes and caps into lists of parameter indices. It is pure: no tensors, no state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace minddp {

struct ParameterInfo {
  int64_t nbytes;
  at::ScalarType dtype;
  at::Device device;
  bool sparse;  // its gradient has no dense layout, so it travels alone
};

struct BucketCaps {
  // Bytes at which the i-th launched bucket closes; the last entry repeats. REQUIRES: not empty.
  std::vector<int64_t> per_bucket;
  // What is reduced last has no backward left to hide behind, so the last bucket is a small one:
  // it closes at this size. 0 leaves it like the others. Used when per_bucket has one entry.
  int64_t last_bucket = 0;
};

// Splits `order` (parameter indices, expected order of gradient arrival) into buckets in the order
// in which they become complete. Every bucket has one dtype and one device and at least one
// parameter. A bucket closes once it has reached its cap, so it exceeds it by less than a parameter.
std::vector<std::vector<size_t>> assign_buckets(
    const std::vector<ParameterInfo>& parameters,
    const std::vector<size_t>& order,
    const BucketCaps& caps);

}  // namespace minddp
