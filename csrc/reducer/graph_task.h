// The nodes of the backward that runs on this thread, as the engine that runs it has found them.
//
// Autograd's engine collects all nodes before it runs the first; with backward(inputs=...) it notes beside each
// whether it is needed. The engine of distributed autograd leaves the collection empty, and notes every node it came
// to: AccumulateGrad nodes are marked as captured, since their gradients go elsewhere (a context of its own).
#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
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
  // The engine has collected them: it is not distributed autograd's, and gradients go to `.grad`.
  bool are_collected() const { return !nodes_.empty(); }
  // Whether one of them runs a graph task of its own: torch.utils.checkpoint's with use_reentrant=True, and copies of
  // that class elsewhere. Another class of a program's own is not known. False in distributed autograd, whose notes
  // may have nodes that are gone.
  bool has_reentrant_checkpoint() const {
    return std::ranges::any_of(nodes_,
        [](const Node* node) { return node->name().find("CheckpointFunctionBackward") != std::string::npos; });
  }
  // Whether it goes to all leaves, and not to given inputs alone, as of autograd.grad().
  bool reaches_all_leaves() const { return notes_.empty(); }
  // Whether it will run an AccumulateGrad node, as far as its own graph shows.
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

// The number of the graph task that runs on this thread; -1: none.
inline int current_graph_task() { return torch::autograd::get_current_graph_task_id(); }

// When the graph task that runs now ends, `ended` is called with its number, then `gone`. If an exception ends it,
// only `gone` is called. If the owner is gone, neither is: a graph may outlive it.
template <class Owner>
void at_end_of_backward(
    std::weak_ptr<Owner> weak, int graph_task, void (Owner::*ended)(int), void (Owner::*gone)(int)) {
  auto call = [weak, graph_task](void (Owner::*what)(int)) {
    if (auto owner = weak.lock()) ((*owner).*what)(graph_task);
  };
  std::shared_ptr<void> task(nullptr, [call, gone](void*) { call(gone); });
  torch::autograd::Engine::get_default_engine().queue_callback([call, ended, task] { call(ended); });
}

}  // namespace minddp
