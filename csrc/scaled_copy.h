// One pass over memory: copy + scale + cast.
//
// Packing a bucket and unpacking it are both "for each piece: dst = cast(src * scale)". Doing the
// three in one pass costs one read and one write of each gradient, where a multiply, a cast and a
// copy in turn would cost three. Pure: no state, any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstddef>

namespace minddp {

struct CopySegment {
  const void* src;  // nullptr: fill with zeros (a gradient that does not exist)
  void* dst;        // may equal src (scaling in place); otherwise they do not overlap
  int64_t numel;
};

// CPU. dst = cast<dst_type>(src * scale), computed in float (double for double and complex double);
// scale == 1 without a cast is a bit-exact copy. REQUIRES: both types floating or complex, or equal.
void scaled_copy(
    const CopySegment* segments,
    size_t count,
    at::ScalarType src_type,
    at::ScalarType dst_type,
    double scale);

}  // namespace minddp
