// The nodes of the backward that runs on this thread, as the engine that runs it has found them.
//
// Autograd's engine collects all nodes before it runs the first; with backward(inputs=...) it notes beside each
// whether it is needed. The engine of distributed autograd leaves the collection empty, and notes every node it came
// to: AccumulateGrad nodes are marked as captured, since their gradients go elsewhere (context_gradients.h).
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>

namespace minddp {

// REQUIRES: a graph task runs on this thread, for as long as this lives.
class GraphTaskNodes {
 public:
  using Node = torch::autograd::Node;

  template <class Predicate>
  bool any(const Predicate& is) const {
    if (!nodes_.empty()) return std::ranges::any_of(nodes_, is);
    return std::ranges::any_of(notes_, [&](const auto& note) { return is(note.first); });
  }
  // Whether one of them runs a graph task of its own: torch.utils.checkpoint's with use_reentrant=True, and copies of
  // that class elsewhere. Another class of a program's own is not known. False in distributed autograd, whose notes
  // may have nodes that are gone.
  bool has_reentrant_checkpoint() const {
    return std::ranges::any_of(nodes_,
        [](const Node* node) { return node->name().find("CheckpointFunctionBackward") != std::string::npos; });
  }
  // Whether it goes to all leaves, and not to given inputs alone, as of autograd.grad().
  bool goes_to_all() const { return notes_.empty(); }
  // Whether it goes to given inputs, and keeps its graph for another backward.
  bool looks_ahead() const { return !goes_to_all() && torch::autograd::get_current_graph_task_keep_graph(); }
  // Whether it will run an AccumulateGrad node, as far as its own graph tells.
  bool accumulates(Node* node) const {
    const auto note = notes_.find(node);
    if (nodes_.empty()) return note != notes_.end() && note->second.captures_;
    return nodes_.count(node) && (notes_.empty() || (note != notes_.end() && note->second.needed_));
  }

 private:
  const std::unordered_set<Node*>& nodes_ = *torch::autograd::get_current_graph_task_nodes_in_graph();
  const std::unordered_map<Node*, torch::autograd::GraphTask::ExecInfo>& notes_ =
      *torch::autograd::get_current_graph_task_exec_info();
};

}  // namespace minddp
