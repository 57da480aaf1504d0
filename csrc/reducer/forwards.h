// Whose backward is it? Which forwards ran, and whether a backward goes through one of them.
//
// A forward of the wrapper is synchronized unless it runs under no_sync. A backward is synchronized if it goes
// through a synchronized forward. Torch assumes that the next backward after a forward goes through it. Here the
// graph's nodes show it: autograd numbers a thread's nodes in order, so a forward's nodes form an interval, and the
// engine collects a backward's nodes before the first hook. Torch's rule still applies in two cases. One: no tensor
// was found in the output of a synchronized forward. Two: a synchronized forward still waits for its backward, and
// the graph has no node of any synchronized forward. A program may also ask for torch's rule: prepare_for_backward().
// A forward waits until an iteration ends, or until a backward goes through another wrapper that shares a parameter
// (torch_surface/shared_parameters.h).
//
// If no synchronized forward has run since the last iteration, a backward may still go through an older one by
// accident: a forward under no_sync has used something that it has left (a feature, a hidden state, autocast's copy
// of a weight). Then a backward is local if it runs under no_sync, or if the last forward did. The rule does not look
// at the graph, since graphs may differ between ranks.
#pragma once

#include "graph_task.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

namespace minddp {

enum class Origin {
  kNone,          // no backward runs
  kSynchronized,  // through a forward that ran outside of no_sync, or adopted by one (see Answer)
  kLocal,         // only through forwards that ran under no_sync, or that are over (see above)
  kBypassed,      // through no forward of the wrapper
};

// Nodes that one thread has made between two moments. Autograd numbers the nodes as it makes them, each thread by
// itself, so they are an interval of numbers.
struct NodeSpan {
  uint64_t begin = 0, end = 0;  // sequence numbers
  uint64_t thread = 0;
  bool synchronized = false;  // a forward's outside of no_sync
};

// The last 64.
class NodeSpans {
 public:
  void add(NodeSpan span) { spans_[count_++ % spans_.size()] = span; }
  // The newest first: most backwards are of the last forward. nullptr: none of them.
  const NodeSpan* find(const torch::autograd::Node& node) const {
    const uint64_t number = node.sequence_nr();
    for (size_t age = 1; age <= std::min(count_, spans_.size()); ++age) {
      const NodeSpan& span = spans_[(count_ - age) % spans_.size()];
      if (number >= span.begin && number < span.end && node.thread_id() == span.thread) return &span;
    }
    return nullptr;
  }

 private:
  std::array<NodeSpan, 64> spans_;
  size_t count_ = 0;
};

class Forwards {
 public:
  void begin() { begin_ = at::sequence_number::peek(); }
  // `visible`: tensors were found in forward's output. If not, a backward that follows counts as this
  // forward's (Reducer::end_forward).
  void end(bool synchronized, bool visible) {
    add(begin_, at::sequence_number::peek(), synchronized);
    hidden_local_ = !synchronized && !visible;
    last_is_local_ = !synchronized;
    if (!synchronized) return;
    none_since_ = false;
    awaits_backward_ = true;
    hidden_ = !visible;
  }
  // Notes that the current thread's nodes `begin` to `end` - 1 belong to a forward. They were made in that forward,
  // or in a backward through it with create_graph=True. The graph of a gradient penalty can consist of such nodes
  // alone.
  void add(uint64_t begin, uint64_t end, bool synchronized) {
    spans_.add({begin, end, at::RecordFunction::currentThreadId(), synchronized});
  }
  // See Reducer::prepare_for_backward().
  void arm() { armed_ = true; }
  bool awaits_backward() const { return awaits_backward_; }  // false once an iteration has ended
  void stop_waiting() { awaits_backward_ = false; }
  void iteration_ends() {
    armed_ = awaits_backward_ = hidden_ = hidden_local_ = false;
    none_since_ = true;
  }

  struct Answer {
    Origin origin;
    bool seen = false;  // the graph task holds nodes of a synchronized forward. (Inside of a reentrant checkpoint it
                        // holds none.)
    bool adopted = false;  // the graph task holds none; a forward that still waits for its backward adopts it
  };
  // Origin of the running graph task. `through`: whether the output that it has reached is a synchronized forward's;
  // empty if it has reached none. A synchronized forward that waits for its backward adopts local backwards; with
  // `adopts`, bypassing ones, too.
  Answer origin(bool adopts, std::optional<bool> through, bool within_no_sync) const {
    const bool over = none_since_ && !armed_ && (last_is_local_ || within_no_sync);
    if (through.value_or(false) && !over) return {Origin::kSynchronized, true};
    if (armed_ || hidden_) return {Origin::kSynchronized};
    bool local = hidden_local_ || through.has_value();
    // Each output of an older forward asks: the nodes are searched only if they can change the answer.
    const bool synchronized = !(over && local) && GraphTaskNodes().any([&](const torch::autograd::Node* node) {
      const NodeSpan* span = spans_.find(*node);
      local |= span != nullptr;
      return span && span->synchronized && !over;
    });
    if (synchronized) return {Origin::kSynchronized, true};
    // As in torch, a synchronized forward that waits for its backward adopts the next one. It may really be that
    // forward's: a reentrant checkpoint makes its graph only during backward, so the graph task has none of the
    // forward's nodes.
    if (awaits_backward_ && (adopts || local)) return {Origin::kSynchronized, false, true};
    return {local ? Origin::kLocal : Origin::kBypassed};
  }

  // Whether the running graph task holds nodes of any forward of the wrapper.
  bool has_nodes_in_graph() const {
    return GraphTaskNodes().any([&](const torch::autograd::Node* node) { return spans_.find(*node) != nullptr; });
  }

 private:
  NodeSpans spans_;  // the last 64; an older forward is known only by its outputs' hooks
  uint64_t begin_ = 0;
  bool none_since_ = true;  // no synchronized forward has run since the last iteration
  bool armed_ = false;
  bool awaits_backward_ = false;
  bool hidden_ = false;         // no tensor was found in the last synchronized forward's output
  bool hidden_local_ = false;   // no tensor was found in the last forward's output, and it ran under no_sync
  bool last_is_local_ = false;  // the last forward ran under no_sync
};

}  // namespace minddp
