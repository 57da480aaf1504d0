#include "errors.h"

#include <sstream>

namespace minddp::errors {
namespace {

std::string on_rank(int rank) {
  return " [rank " + std::to_string(rank) + "]";
}

std::string quoted(const Parameter& p) {
  return "'" + p.name + "' (index " + std::to_string(p.index) + ")";
}

}  // namespace

std::string unfinished_reduction(int rank, const std::vector<Parameter>& missing, Cause cause) {
  std::ostringstream text;
  text << "Expected to have finished reduction in the prior iteration before starting a new one. ";
  if (cause == Cause::kBackwardRaised) {
    text << "The previous backward on rank " << rank << " ended with an exception, so its gradients "
         << "were never averaged, and the other ranks may wait for them: restart from a checkpoint.";
  } else if (cause == Cause::kGraphChanged) {
    text << "This error indicates that your training graph has changed in this iteration, e.g., one "
         << "parameter is used in first iteration, but then got unused in the second iteration. this is "
         << "not compatible with static_graph set to True.";
  } else {
    text << "This error indicates that your module has parameters that were not used in producing loss. "
         << "You can enable unused parameter detection by passing the keyword argument "
         << "`find_unused_parameters=True` to `minddp.DistributedDataParallel` (it costs no graph walk), "
         << "and by making sure all `forward` function outputs participate in calculating loss. For "
         << "c10d's own log beside it, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO "
         << "or DETAIL.";
  }
  text << "\nParameter indices which did not receive grad for rank " << rank << ":";
  for (const auto& p : missing) {
    text << " " << p.index;
  }
  text << "\nParameters which did not receive grad for rank " << rank << ": ";
  for (size_t i = 0; i < missing.size(); ++i) {
    text << (i ? ", " : "") << missing[i].name;
  }
  return text.str();
}

std::string ready_twice(int rank, const Parameter& parameter, int64_t arrivals) {
  std::ostringstream text;
  text << "Expected to mark a variable ready only once. The gradient of parameter " << quoted(parameter)
       << " arrived " << arrivals << " times in one backward, the last time after its bucket had been "
       << "sent. Usual causes: the parameter takes part in several activation checkpoints, or in the "
       << "checkpointed and the plain part of the model, and how often differs between iterations. "
       << "Parameter at index " << parameter.index << " with name " << parameter.name
       << " has been marked as ready twice. "
       << "Pass static_graph=True if every iteration does the same, use "
       << "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or keep the parameter out of "
       << "the checkpointed part." << on_rank(rank);
  return text.str();
}

std::string graph_changed(int rank, const Parameter& parameter) {
  return "Your training graph has changed in this iteration: static_graph=True, but parameter " +
      quoted(parameter) + " got a gradient, which it did on no rank in the first iteration. Construct " +
      "with static_graph=False and find_unused_parameters=True." + on_rank(rank);
}

std::string unexpected_layout(int rank, const std::string& name, bool expected_sparse) {
  return "The gradient of parameter '" + name + "' is " + (expected_sparse ? "dense" : "sparse") +
      ", but a " + (expected_sparse ? "sparse" : "dense") + " one was expected: " +
      (expected_sparse ? "its module says sparse=True. Keep the layout the same in all iterations."
                       : "only nn.Embedding and nn.EmbeddingBag with sparse=True may produce sparse "
                         "gradients. Set sparse=True on the module, or make the gradient dense.") +
      on_rank(rank);
}

std::string wrong_device(
    int rank, const std::string& name, const std::string& found, const std::string& expected) {
  return "The gradient of parameter '" + name + "' is on " + found + ", its bucket on " + expected +
      ". The parameter was moved after DistributedDataParallel was constructed: move the module first, "
      "then wrap it." + on_rank(rank);
}

std::string wrong_hook_result(
    int rank, size_t bucket, const std::string& found, const std::string& expected) {
  return "The communication hook's future for bucket " + std::to_string(bucket) + " holds " + found +
      ", expected " + expected + ": a single tensor with as many elements as bucket.buffer()." +
      on_rank(rank);
}

std::string weight_missing(int rank, bool here) {
  return std::string("reduction=\"weighted\" needs ddp.add_weight(n) before each synchronized backward, ") +
      (here ? "and this rank did not call it." : "and another rank did not call it.") + on_rank(rank);
}

std::string weight_not_positive(int rank, double total) {
  std::ostringstream text;
  text << "reduction=\"weighted\": the ranks' weights add up to " << total
       << "; the sum of all ddp.add_weight(n) must be positive." << on_rank(rank);
  return text.str();
}

}  // namespace minddp::errors
