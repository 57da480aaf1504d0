// Which stretch of a program made an autograd node.
//
// Autograd numbers the nodes as it makes them, each thread by itself: those that were made between two moments on one
// thread are an interval of numbers.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace minddp {

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

}  // namespace minddp
