// Facts -> message text: what happened, to which parameters by name on which rank, what to do next.
// Pure functions: what the reducer raises for what a program does. (Misuse by other units is a TORCH_CHECK in place.)
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <vector>

namespace minddp::errors {

struct Parameter {
  size_t index;
  std::string name;
};
enum class Cause { kUnused, kBackwardRaised, kGraphChanged };

inline const char* explain(Cause cause) {
  if (cause == Cause::kBackwardRaised)
    return "The previous backward ended with an exception, so its gradients were never averaged, and the other ranks "
           "may still wait for them. Where all ranks met that exception alike, call minddp.abort_iteration(ddp) "
           "on each and go on; otherwise restart from a checkpoint.";
  if (cause == Cause::kGraphChanged)
    return "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
           "in first iteration, but then got unused in the second iteration. this is not compatible with "
           "static_graph set to True.";
  return "This error indicates that your module has parameters that were not used in producing loss. You can enable "
         "unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
         "`minddp.DistributedDataParallel` (here it costs no graph walk), and by making sure all `forward` function "
         "outputs participate in calculating loss. For c10d's own log of collectives, set the environment variable "
         "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL.";
}

// Backward left gradients un-averaged; raised at the next forward or optimizer step.
inline std::string unfinished_reduction(int rank, const std::vector<Parameter>& missing, Cause cause) {
  std::string indices, names;
  for (const Parameter& p : missing) {
    indices += c10::str(" ", p.index);
    names += c10::str(names.empty() ? "" : ", ", p.name);
  }
  const std::string who = c10::str("which did not receive grad for rank ", rank, ":");
  return c10::str("Expected to have finished reduction in the prior iteration before starting a new one. ",
      explain(cause), "\nParameter indices ", who, indices, "\nParameters ", who, " ", names);
}

// The next forward, or optimizer.step(), came before finalize_backward().
inline std::string not_finalized(int rank) {
  return c10::str("Expected to have finalized the prior backward pass before starting a new one. Call ",
      "finalize_backward() after backward() when require_manual_backward_finalization is true. [rank ", rank, "]");
}

// A gradient came again when what had come was scaled or sent already.
inline std::string ready_twice(int rank, const Parameter& p, int arrivals) {
  return c10::str("Expected to mark a variable ready only once. Parameter at index ", p.index, " with name ", p.name,
      " has been marked as ready twice: its gradient arrived ", arrivals,
      " times, at last after its bucket had been packed. Usual cause: activation checkpoints that use it a varying ",
      "number of times: pass use_reentrant=False to them. With require_manual_backward_finalization: ",
      "finalize_backward() came before the last gradient, or another backward before it. [rank ", rank, "]");
}

// static_graph: a parameter got a gradient that was unused here, or had none on any rank, in the first iteration.
inline std::string graph_changed(int rank, const Parameter& p) {
  return c10::str("Your training graph has changed in this iteration: static_graph=True, but parameter '", p.name,
      "' got a gradient, which it did not in the first iteration. Construct with static_graph=False and "
      "find_unused_parameters=True. [rank ",
      rank, "]");
}

inline std::string kind(at::Layout layout, at::ScalarType dtype, at::Device device) {
  const std::string name = layout == at::kStrided ? "dense" : layout == at::kSparse ? "sparse" : c10::str(layout);
  return c10::str(name, " ", dtype, " on ", device);
}

// A gradient of another layout or device than its bucket's.
inline std::string wrong_gradient(
    int rank, const std::string& name, const std::string& found, const std::string& expected) {
  return c10::str("The gradient of parameter '", name, "' is ", found, ", expected ", expected,
      ". Sparse gradients may come only from nn.Embedding and nn.EmbeddingBag with sparse=True, then in every "
      "iteration; parameters are cast and moved before the module is wrapped, or minddp.refresh(ddp) is called on ",
      "every rank after it. [rank ", rank, "]");
}

// A gradient whose numbers are nowhere.
inline std::string no_memory(int rank, const std::string& name, size_t there, size_t expected) {
  return c10::str("The gradient of parameter '", name, "' has ", there, " bytes of memory, expected ", expected,
      ". Its storage was resized, or it belongs to a mode whose tensors have no values (functional ones, say): put "
      "a ",
      "tensor with values into .grad, or None. [rank ", rank, "]");
}

inline std::string wrong_hook_result(int rank, size_t bucket, int64_t found, int64_t expected) {
  return c10::str("The communication hook's future or buffer for bucket ", bucket, " holds a tensor of ", found,
      " elements in memory, expected ", expected, ": one tensor, as large as bucket.buffer(). [rank ", rank, "]");
}

}  // namespace minddp::errors
