// Which parameters took part in a backward, and how often their gradients arrive.
//
// A gradient usually arrives once a backward, but a parameter shared between activation checkpoints gets
// several contributions, each with its own arrival. The first synchronized backward counts them, and sends
// nothing before its end; from then on a parameter is ready at its usual last arrival.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace minddp {

struct ParamUsage {
  enum class Arrival { kEarly, kLast, kExtra };
  explicit ParamUsage(size_t count) : arrivals(count, 0), expected(count, 1), local_used_map(count, 0) {}

  std::vector<int32_t> arrivals;  // in this backward
  std::vector<int32_t> expected;  // at which the gradient is whole
  // 1 where a (defined) gradient arrived since the last synchronization: no_sync accumulates what the next one sends.
  std::vector<int32_t> local_used_map;

  Arrival note_arrival(size_t index) {
    int32_t left = expected[index] - ++arrivals[index];
    return left > 0 ? Arrival::kEarly : left == 0 ? Arrival::kLast : Arrival::kExtra;
  }
  void learn_expected() {
    for (size_t i = 0; i < arrivals.size(); ++i) expected[i] = std::max(arrivals[i], 1);
  }
  std::vector<size_t> missing() const {
    std::vector<size_t> indices;
    for (size_t i = 0; i < arrivals.size(); ++i)
      if (arrivals[i] == 0) indices.push_back(i);
    return indices;
  }
};

}  // namespace minddp
