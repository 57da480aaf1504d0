// What is to happen when the backward that runs now is over, one way or the other.
//
// Autograd calls back at the end of a graph task. If an exception ends the task, the callback is only destroyed. No
// state. To be called on a thread that runs a graph task.
#pragma once

#include <torch/csrc/autograd/engine.h>

#include <memory>

namespace minddp {

// When the graph task that runs now ends, `ended` is called with its number, then `gone`. If an exception ends it,
// only `gone` is called. If the owner is gone, neither is: a graph may outlive it.
template <class Owner>
void at_end_of_backward(
    std::weak_ptr<Owner> weak, int graph_task, void (Owner::*ended)(int), void (Owner::*gone)(int)) {
  auto tell = [weak, graph_task](void (Owner::*what)(int)) {
    if (auto owner = weak.lock()) ((*owner).*what)(graph_task);
  };
  std::shared_ptr<void> task(nullptr, [tell, gone](void*) { tell(gone); });
  torch::autograd::Engine::get_default_engine().queue_callback([tell, ended, task] { tell(ended); });
}

}  // namespace minddp
