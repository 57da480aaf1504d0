// How the ranks' pieces of a bucket's buffer are added up.
#pragma once

#include "copy/reduce.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace minddp {

// pieces[0] becomes pieces[0] + pieces[1] + ..., in this order. The pieces are bytes, as long as each other, one
// after the other in memory; the first of them is unit `begin` of the buffer. On the CPU it runs on a thread of its
// own, for one piece of a buffer at a time; on a device it is enqueued.
using AddPieces = std::function<void(const std::vector<at::Tensor>& pieces, int64_t begin)>;

struct PieceSum {
  int64_t unit;  // bytes that are never split: an element's, or a block's
  AddPieces add;
};

// Element by element; half and bfloat16 are added in float, and rounded once.
PieceSum sum_of_elements(at::ScalarType dtype);

}  // namespace minddp
