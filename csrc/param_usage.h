// Which parameters took part in a backward, and how often their gradients arrive.
//
// A gradient usually arrives once a backward, but a parameter shared between activation checkpoints
// gets several contributions, each with its own arrival. The first synchronized backward counts
// them; from then on a parameter is ready at its usual last arrival. The first backward itself sends
// nothing before its end, so it needs no count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace minddp {

class ParamUsage {
 public:
  enum class Arrival { kEarly, kLast, kExtra };

  explicit ParamUsage(size_t count)
      : arrivals_(count, 0), expected_(count, 1), local_used_(count, 0) {}

  // A gradient arrived in a backward that is not synchronized (no_sync): it counts as used at the
  // next synchronization, which sends what has been accumulated.
  void note_unsynchronized(size_t index) { local_used_[index] = 1; }

  Arrival note_arrival(size_t index) {
    local_used_[index] = 1;
    int32_t arrived = ++arrivals_[index];
    int32_t expected = expected_[index];
    return arrived < expected ? Arrival::kEarly : arrived == expected ? Arrival::kLast : Arrival::kExtra;
  }

  void expect_at_least(size_t index, int32_t arrivals) {
    expected_[index] = std::max(expected_[index], arrivals);
  }

  // From here on, a parameter is ready at as many arrivals as this backward had.
  void learn_expected() {
    for (size_t i = 0; i < arrivals_.size(); ++i) {
      expected_[i] = std::max(arrivals_[i], 1);
    }
  }

  bool arrived(size_t index) const { return arrivals_[index] > 0; }
  int32_t arrivals(size_t index) const { return arrivals_[index]; }

  std::vector<size_t> missing() const {
    std::vector<size_t> indices;
    for (size_t i = 0; i < arrivals_.size(); ++i) {
      if (arrivals_[i] == 0) {
        indices.push_back(i);
      }
    }
    return indices;
  }

  // 1 where a gradient arrived since the last synchronization, no_sync backwards included.
  const std::vector<int32_t>& local_used_map() const { return local_used_; }

  void begin_backward() { std::fill(arrivals_.begin(), arrivals_.end(), 0); }
  void end_synchronization() { std::fill(local_used_.begin(), local_used_.end(), 0); }

 private:
  std::vector<int32_t> arrivals_;
  std::vector<int32_t> expected_;
  std::vector<int32_t> local_used_;
};

}  // namespace minddp
