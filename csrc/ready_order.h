// The order in which gradients arrive, recorded in one backward and agreed upon by all ranks.
//
// Parameters are registered in the order of definition; gradients come roughly, not exactly, the
// other way round. Buckets cut along the true order are complete sooner. Ranks may observe different
// orders (branches, several autograd threads), and a bucket must hold the same parameters on all of
// them: rank 0's order is everyone's.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <vector>

namespace minddp {

class ReadyOrder {
 public:
  explicit ReadyOrder(size_t count) : position_(count, kNotSeen) {}

  // The last arrival counts: before it the gradient is not whole.
  void note_arrival(size_t index) { position_[index] = next_++; }
  void begin() {
    std::fill(position_.begin(), position_.end(), kNotSeen);
    next_ = 0;
  }

  struct Order {
    std::vector<size_t> arrived;  // parameter indices by arrival
    std::vector<size_t> absent;   // never seen; highest index first: defined last usually comes first
  };
  Order order() const;

  // Collective: the order() of `group`'s rank 0, on every rank.
  Order agree(c10d::ProcessGroup& group, at::Device device) const;

 private:
  static constexpr int64_t kNotSeen = INT64_MAX;
  std::vector<int64_t> position_;
  int64_t next_ = 0;
};

}  // namespace minddp
