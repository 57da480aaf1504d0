// What the reducer knows of one iteration (`Iteration`) and of one backward (`Backward`). Each is forgotten as a
// whole. `Learned` holds what iterations have taught, and stays.
//
// A gradient usually arrives once per backward. It arrives in several contributions if an iteration has several
// backwards (in several threads, or because the first left gradients missing), or if several reentrant checkpoints
// use its parameter. The first iteration counts them. If its graph does not show that each gradient comes once, it
// sends nothing before the end of backward. From then on a gradient is whole at that count. One more arrival raises
// the count, if the bucket has not left. The count never falls: where fewer arrive, the bucket leaves at the end of
// backward.
#pragma once

#include "forwards.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace minddp {

enum class Phase { kIdle, kBackward, kIncomplete, kLaunched };
using Flags = std::vector<char>;  // by parameter

// An iteration lasts from the first gradient of a synchronized backward to the averages.
struct Iteration {
  explicit Iteration(size_t count) : arrivals(count, 0), absent(count, 0), accumulated(count, 0) {}
  // A copy, unlike a move, keeps the vectors' memory: another thread may read them.
  void forget() {
    const Iteration blank(arrivals.size());
    *this = blank;
  }
  // Parameters that backward has not reached at all.
  std::vector<size_t> missing() const {
    std::vector<size_t> indices;
    for (size_t i = 0; i < arrivals.size(); ++i)
      if (arrivals[i] == 0) indices.push_back(i);
    return indices;
  }

  Phase phase = Phase::kIdle;
  size_t next_bucket = 0;        // the first that has neither been launched nor skipped
  bool comes_once = false;       // the graph shows that each gradient arrives once (Reducer::predict_arrivals)
  bool launches_at_end = false;  // an adopted backward: more contributions may follow
  bool used_map_sent = false;
  bool too_late = false;          // a gradient has come in kLaunched: only abort_iteration() leaves it
  std::vector<int32_t> arrivals;  // by parameter
  Flags absent;                   // marked ready when the iteration began
  Flags accumulated;              // autograd has added a gradient; a hook may have removed it from `.grad` since
  bool outside_grad = false;      // a case keeps its gradients elsewhere than in `.grad`
  int last_backward = -1;         // the number of the backward at whose end the last buckets leave
};

// What earlier iterations have taught.
struct Learned {
  explicit Learned(size_t count) : expected(count, 1), nested(count, 0), order(count, -1) {}
  std::vector<int32_t> expected;  // the arrival at which a gradient is whole
  Flags nested;                   // its gradient is from a graph that a reentrant checkpoint makes during backward
  std::vector<int32_t> order;     // the number of each one's last arrival in the last iteration; -1: none
  int32_t arrivals = 0;           // in the last iteration
  int64_t begun = 0;              // iterations that have begun
  int64_t iterations = 0;         // iterations that have ended with averages

  enum class Arrival { kEarly, kLast, kExtra };
  void begin_iteration() {
    ++begun;
    arrivals = 0;
    std::fill(order.begin(), order.end(), -1);
  }
  Arrival note_arrival(Iteration& iteration, size_t index, bool has_gradient) {
    order[index] = arrivals++;
    const int32_t left = expected[index] - ++iteration.arrivals[index];
    iteration.accumulated[index] |= has_gradient;
    if (iteration.absent[index] || left < 0) return Arrival::kExtra;
    return left > 0 ? Arrival::kEarly : Arrival::kLast;
  }
};

// The backward that runs, from its first notice to its end. The reducer notices a backward when it reaches an output
// of a forward, or brings a gradient (Reducer::enter_backward). A graph task is one run of autograd's engine.
// `graph_tasks` holds the task of the first notice, and each other one that has reached an output of a synchronized
// forward: threads may call backward() at the same time. The inner task of a reentrant checkpoint is there on the
// same conditions only.
struct Backward {
  std::vector<int> graph_tasks;  // as autograd numbers them
  Origin origin = Origin::kNone;
  bool adopted = false;             // a synchronized forward that waited for its backward has adopted it
  bool makes_graph = false;         // create_graph=True
  bool comes_once = false;          // see Reducer::predict_arrivals
  bool reaches_all_leaves = false;  // backward() without `inputs`: it brings each gradient that its graph has
  uint64_t begin = 0;               // number of the first node that it makes
  Flags takes_part;                 // see GradHooks::taking_part; empty: not asked for

  bool runs() const { return !graph_tasks.empty(); }
  bool has(int graph_task) const { return std::ranges::count(graph_tasks, graph_task) > 0; }
  bool is_synchronized() const { return origin == Origin::kSynchronized; }
  void join(const Forwards::Answer& answer) {
    origin = answer.origin;
    adopted |= answer.adopted;
  }
};

}  // namespace minddp
