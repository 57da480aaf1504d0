// Whose backward is it? Which forwards ran, and whether a backward goes through one of them.
//
// Where forward ran decides whether a backward is synchronized, as in torch: not under no_sync, and not where
// somebody called the wrapped module itself. Torch arms its reducer in forward and takes the next backward for that
// forward's. Here the backward is asked: autograd numbers its nodes as it makes them, so those that a forward made
// are an interval, and autograd's engine has collected a backward's nodes before the first hook runs.
#pragma once

#include "support/graph_task.h"
#include "support/node_spans.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>

namespace minddp {

enum class Origin {
  kNone,          // no backward runs
  kSynchronized,  // through a forward outside of no_sync
  kLocal,         // through forwards under no_sync only
  kBypassed,      // through no forward of the wrapper
};

class Forwards {
 public:
  void begin() { begin_ = at::sequence_number::peek(); }
  // `visible`: tensors were found in what forward returned, so a backward that reaches none of them is another's.
  void end(bool synchronized, bool visible) {
    add(begin_, at::sequence_number::peek(), synchronized);
    hidden_local_ = !synchronized && !visible;
    if (!synchronized) return;
    ++history_.forwards;
    awaits_backward_ = true;
    hidden_ = !visible;
  }
  // Nodes that the current thread made from `begin` to `end`: a forward's, or those of a backward with
  // create_graph=True through its outputs. A gradient penalty's graph may hold none of forward's nodes.
  void add(uint64_t begin, uint64_t end, bool synchronized) {
    spans_.add({begin, end, at::RecordFunction::currentThreadId(), synchronized});
  }
  // The next backward is synchronized wherever forward ran: what callers of `reducer.prepare_for_backward` expect.
  void arm() { armed_ = true; }
  bool awaits_backward() const { return awaits_backward_; }
  void stop_waiting() { awaits_backward_ = false; }
  void local_backward_ends() { ++history_.local_backwards; }
  void iteration_ends() {
    armed_ = awaits_backward_ = hidden_ = hidden_local_ = false;
    history_ = {};
  }
  // Synchronized forwards, and backwards that were not, since the last iteration. Ranks compare them: if they are
  // equal, a backward that was taken on one rank is, on the other, the one that its forward waited for.
  struct History {
    int64_t forwards = 0, local_backwards = 0;
  };
  const History& history() const { return history_; }

  struct Answer {
    Origin origin;
    bool seen = false;   // the graph task holds nodes of a synchronized forward: it is no checkpoint's
    bool taken = false;  // it does not, but such a forward waits for a backward
  };
  // Of the graph task that runs now. Walks its nodes once, until one of a synchronized forward is found. `takes`: a
  // waiting forward takes bypassing backwards, too, not local ones alone.
  Answer origin(bool takes) const {
    if (armed_ || hidden_) return {Origin::kSynchronized};
    bool local = hidden_local_;
    const bool synchronized = GraphTaskNodes().any([&](const torch::autograd::Node* node) {
      const NodeSpan* span = spans_.find(*node);
      local |= span != nullptr;
      return span && span->synchronized;
    });
    if (synchronized) return {Origin::kSynchronized, true};
    // As in torch, a synchronized forward whose backward has not come takes what comes. It may be its own: a
    // reentrant checkpoint makes its graph during backward.
    if (awaits_backward_ && (takes || local)) return {Origin::kSynchronized, false, true};
    return {local ? Origin::kLocal : Origin::kBypassed};
  }

  // Whether the graph task that runs now holds nodes of any forward of the wrapper.
  bool has_nodes_in_graph() const {
    return GraphTaskNodes().any([&](const torch::autograd::Node* node) { return spans_.find(*node) != nullptr; });
  }

 private:
  NodeSpans spans_;  // the last 64; an older forward is known by its outputs' hooks alone
  History history_;
  uint64_t begin_ = 0;
  bool armed_ = false;
  bool awaits_backward_ = false;
  bool hidden_ = false;
  bool hidden_local_ = false;  // the last forward was under no_sync, and shows no nodes either
};

}  // namespace minddp
