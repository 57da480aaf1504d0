// What a reduction that is no mean raises for what a program does; as reducer/errors.h.
#pragma once

#include <c10/util/StringUtil.h>

#include <string>

namespace minddp::errors {

// With reduction="sum" or "weighted": a gradient is the result of the reduction before.
inline std::string summed_again(int rank, const std::string& name) {
  return c10::str("The gradient of '", name, "' holds the result of an earlier synchronized backward, which ",
      "reduction=\"sum\" or \"weighted\" would sum over the ranks again. Call zero_grad() before each synchronized ",
      "backward; to accumulate, run all but the last backward, and their forwards, in no_sync(). [rank ", rank, "]");
}

}  // namespace minddp::errors
