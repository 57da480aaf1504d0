// Facts -> message text. Pure functions: what happened, to which parameters by name on which rank,
// and what to do next. Every error the reducer raises is worded here, and tested without a reducer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace minddp::errors {

struct Parameter {
  size_t index;
  std::string name;
};

enum class Cause { kUnused, kBackwardRaised, kGraphChanged };

// "backward left gradients un-averaged" (raised at the next forward or step).
std::string unfinished_reduction(int rank, const std::vector<Parameter>& missing, Cause cause);

// "a gradient came again after its bucket had been sent".
std::string ready_twice(int rank, const Parameter& parameter, int64_t arrivals);

// "static_graph=True, but a parameter that was unused in the first iteration got a gradient".
std::string graph_changed(int rank, const Parameter& parameter);

std::string unexpected_layout(int rank, const std::string& name, bool expected_sparse);
std::string wrong_device(
    int rank, const std::string& name, const std::string& found, const std::string& expected);
std::string wrong_hook_result(
    int rank, size_t bucket, const std::string& found, const std::string& expected);
std::string weight_missing(int rank, bool here);
std::string weight_not_positive(int rank, double total);

}  // namespace minddp::errors
