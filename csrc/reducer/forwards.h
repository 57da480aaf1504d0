// Whose backward is it? Which forwards ran, and whether a backward goes through one of them.
//
// Where forward ran decides whether a backward is synchronized, as in torch: not under no_sync, and not where
// somebody called the wrapped module itself. Torch arms its reducer in forward and takes the next backward for that
// forward's. Here the backward is asked: autograd numbers its nodes as it makes them, so those that a forward made
// are an interval, and autograd's engine has collected a backward's nodes before the first hook runs.
#pragma once

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace minddp {

enum class Origin {
  kSynchronized,  // through a forward outside of no_sync
  kLocal,         // through forwards under no_sync only
  kBypassed,      // through no forward of the wrapper
};

class Forwards {
 public:
  void begin() {
    begin_ = at::sequence_number::peek();
    if (torch::autograd::get_current_graph_task_id() == -1) second_order_ = false;  // not a checkpoint's
  }
  void end(bool synchronized) {
    spans_[count_++ % spans_.size()] = {begin_, at::sequence_number::peek(), synchronized};
  }
  // The next backward is synchronized wherever forward ran: what callers of `reducer.prepare_for_backward` expect.
  void arm() { armed_ = true; }
  void disarm() { armed_ = false; }
  // A backward with create_graph=True went through a synchronized forward. What it made has nodes of its own, and
  // perhaps none of forward's: a gradient penalty.
  void note_second_order() { second_order_ = true; }

  // Of the graph task that runs now. Walks its nodes once, until one of a synchronized forward is found.
  Origin origin() const {
    if (armed_) return Origin::kSynchronized;
    bool local = false;
    for (const torch::autograd::Node* node : *torch::autograd::get_current_graph_task_nodes_in_graph()) {
      const Span* span = find(node->sequence_nr());
      if (span && span->synchronized) return Origin::kSynchronized;
      local |= span != nullptr;
    }
    if (second_order_) return Origin::kSynchronized;
    return local ? Origin::kLocal : Origin::kBypassed;
  }

 private:
  struct Span {
    uint64_t begin = 0, end = 0;  // sequence numbers of the forward's nodes, on the thread that ran it
    bool synchronized = false;
  };
  // The newest first: most backwards are of the last forward.
  const Span* find(uint64_t number) const {
    for (size_t age = 1; age <= std::min(count_, spans_.size()); ++age) {
      const Span& span = spans_[(count_ - age) % spans_.size()];
      if (number >= span.begin && number < span.end) return &span;
    }
    return nullptr;
  }

  // So many forwards may wait for their backward. One that is older is still known by its outputs' hooks.
  std::array<Span, 64> spans_;
  size_t count_ = 0;
  uint64_t begin_ = 0;
  bool armed_ = false;
  bool second_order_ = false;
};

}  // namespace minddp
