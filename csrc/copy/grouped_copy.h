// The copying pass by torch's operators on lists, for devices that have no kernel of ours.
//
// A copy and a multiplication for each segment are two launches a gradient, each longer than its work. One operator
// on a list of tensors is a few launches for all of them. Pure.
#pragma once

#include "scaled_copy.h"

namespace minddp {

// As scaled_copy, on the current stream: at most three operators, whatever the number of segments.
void grouped_copy(const std::vector<CopySegment>& segments, at::Device device, at::ScalarType src, at::ScalarType dst,
    double scale);

}  // namespace minddp
