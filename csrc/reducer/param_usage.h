// Which parameters took part in a backward, and how often their gradients arrive.
//
// A gradient usually arrives once a backward. One of several backwards before a synchronization, or a parameter
// shared between reentrant checkpoints, gets several contributions, each with its own arrival. The first synchronized
// iteration counts them, and sends nothing before its end; from then on a parameter is ready at its usual last
// arrival.
#pragma once

#include "support/same_tensor.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace minddp {

struct ParamUsage {
  using Flags = std::vector<char>;  // by parameter
  enum class Arrival { kEarly, kLast, kExtra };
  static constexpr int kNone = -1;
  explicit ParamUsage(size_t count)
      : arrivals(count, 0), expected(count, 1), local_used_map(count, 0), absent(count, 0), grown(count, 0),
        nested(count, 0), outside_no_sync(count, 0), bypassed_in(count, kNone), arrived_in(count, kNone),
        bypassed_grad(count) {}

  std::vector<int32_t> arrivals;  // in this iteration
  std::vector<int32_t> expected;  // at which the gradient is whole: as many as ever came
  // 1 where a (defined) gradient arrived since the last synchronization: no_sync accumulates what the next one sends.
  std::vector<int32_t> local_used_map;
  Flags absent;           // in this iteration, marked ready at its beginning
  Flags grown;            // autograd has added a gradient in this iteration; a hook may have taken it from `.grad`
  Flags nested;           // has arrived from a graph inside backward's own, which nobody knows when backward begins
  Flags outside_no_sync;  // local, though its backward ran where gradients are synchronized; since the last iteration
  // Backwards, as autograd numbers its graph tasks: the last one past the wrapper that left a gradient which was not
  // synchronized since, and the last one through a forward of the wrapper.
  std::vector<int> bypassed_in, arrived_in;
  std::vector<SameTensor> bypassed_grad;  // where the former went; .grad may have been replaced since

  // A parameter that is used in two nested graphs arrives twice: it is whole with the last arrival that was learned.
  Arrival note_arrival(size_t index, bool has_gradient) {
    ++arrivals[index];
    grown[index] |= has_gradient;
    if (absent[index]) return Arrival::kExtra;
    int32_t left = expected[index] - arrivals[index];
    return left > 0 ? Arrival::kEarly : left == 0 ? Arrival::kLast : Arrival::kExtra;
  }
  // Parameters that have not come at all in this iteration.
  std::vector<size_t> missing() const {
    std::vector<size_t> indices;
    for (size_t i = 0; i < arrivals.size(); ++i)
      if (arrivals[i] == 0) indices.push_back(i);
    return indices;
  }
  // Of the same parameter, as another reducer knows it. How often it arrives is learned anew.
  void take_over(size_t index, const ParamUsage& before, size_t there) {
    local_used_map[index] = before.local_used_map[there];
    outside_no_sync[index] = before.outside_no_sync[there];
    bypassed_in[index] = before.bypassed_in[there];
    arrived_in[index] = before.arrived_in[there];
    bypassed_grad[index] = before.bypassed_grad[there];
  }
  // What was used, and where it went, is of `.grad` and not of an iteration: no_sync fills it over several backwards.
  void begin_iteration() {
    std::fill(arrivals.begin(), arrivals.end(), 0);
    std::fill(absent.begin(), absent.end(), 0);
    std::fill(grown.begin(), grown.end(), 0);
  }
  // What has been accumulated is on all ranks now, but for what is never sent.
  template <typename NeverSent>
  void end_iteration(const NeverSent& never_sent) {
    std::fill(local_used_map.begin(), local_used_map.end(), 0);
    std::fill(outside_no_sync.begin(), outside_no_sync.end(), 0);
    for (size_t i = 0; i < bypassed_in.size(); ++i)
      if (!never_sent(i)) bypassed_in[i] = kNone;
  }
};

}  // namespace minddp
