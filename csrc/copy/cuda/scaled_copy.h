// One pass over memory on a GPU: copy + scale + cast of any number of pieces in one kernel launch.
//
// The CUDA twin of ../scaled_copy.h, with the same meaning for every segment. A bucket of 400 small
// gradients is one launch here, where a copy per gradient would be 400, each with a launch latency
// larger than the copy itself. Needs no header of the CUDA toolkit. Any thread may call it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "copy/scaled_copy.h"

namespace minddp {
namespace cuda {

// Whether the kernel runs on `device`: whether the build has code for it. Warns once where it has not.
bool covers(c10::DeviceIndex device);

// Enqueues dst = cast<dst_type>(src * scale) for every segment on the current stream of `device` and
// returns at once: the host never waits. Computed in float, or in double where either type is double;
// scale == 1 without a cast is a bit-exact copy. Legal while the stream is captured into a CUDA graph.
//
// REQUIRES: covers(device); both types floating, or both complex, or equal with scale == 1;
//   segments' memory on `device`, and alive until the stream has passed this point;
//   src and dst of a segment are equal (then the types' sizes are too) or do not overlap.
void scaled_copy(const std::vector<CopySegment>& segments, at::ScalarType src_type, at::ScalarType dst_type,
    double scale, c10::DeviceIndex device);

}  // namespace cuda
}  // namespace minddp
