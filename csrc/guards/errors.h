// What the guards' cases raise for what a program does; as reducer/errors.h.
#pragma once

#include <c10/util/StringUtil.h>

#include <string>

namespace minddp::errors {

// An iteration of several backwards: what an earlier one brought was removed or zeroed before the average.
inline std::string taken_between(int rank, const std::string& name) {
  return c10::str("Expected to mark a variable ready only once. The gradient of '", name, "' came in an earlier ",
      "backward of this iteration, was removed or zeroed before it could be averaged, and comes again: the average ",
      "would lack the first. Gradients are averaged once all parameters have theirs. Call zero_grad() before the ",
      "first backward alone and add the losses up in `.grad`; to put each loss's gradients aside, use ",
      "find_unused_parameters=True, which averages after each backward. [rank ", rank, "]");
}

}  // namespace minddp::errors
