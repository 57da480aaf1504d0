// One pass over memory: copy + scale + cast.
//
// Packing a bucket and unpacking it are both "for each piece: dst = cast(src * scale)". One pass costs one
// read and one write of each gradient; a multiply, a cast and a copy in turn would cost three. Pure. The CPU
// loops are in cpu/, the kernel in cuda/.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace minddp {

struct CopySegment {
  const void* src;  // nullptr: fill with zeros (a gradient that does not exist)
  void* dst;        // may equal src (scaling in place); otherwise they do not overlap
  int64_t numel;
};

// On any device (CUDA: one kernel on the current stream). Computed in float, double for double; scale == 1
// without a cast is a bit-exact copy. REQUIRES: both types floating or complex, or equal.
void scaled_copy(const std::vector<CopySegment>& segments, at::Device device, at::ScalarType src, at::ScalarType dst,
    double scale);

// The readable version of one segment, for every device; the fast ones must agree with it.
void scaled_copy_reference(
    const CopySegment& segment, at::Device device, at::ScalarType src, at::ScalarType dst, double scale);

}  // namespace minddp
