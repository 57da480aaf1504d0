// How the ranks' pieces of a bucket's buffer are added up.
#pragma once

#include "support/reduce.h"

#include <ATen/core/Tensor.h>

#include <functional>

namespace minddp {

struct PieceSum {
  int64_t unit;  // bytes that are never split: an element's, or a block's
  // destination = sources[0] + ... + sources[count - 1], in this order: pieces of `units` units, the first of which
  // is unit `begin` of the buffer. The destination is one of the sources, or overlaps none. Runs on a thread of its
  // own, for one piece of a buffer at a time.
  std::function<void(void* destination, const void* const* sources, int count, int64_t begin, int64_t units)> add;
};

// Element by element; half and bfloat16 are added in float, and rounded once.
inline PieceSum sum_of_elements(at::ScalarType dtype) {
  const ReduceFunction reduce = reduce_function(c10d::ReduceOp::SUM, dtype);
  return {int64_t(at::elementSize(dtype)),
      [reduce](void* destination, const void* const* sources, int count, int64_t, int64_t units) {
        reduce(destination, sources, count, units);
      }};
}

}  // namespace minddp
