// Element-wise reductions over several ranks' copies of the same elements.
//
// The sources are combined in the order given, which is the order of ranks, so every rank that
// computes an element gets the same bits. half and bfloat16 are combined in float and rounded once.
// MIN and MAX are IEEE 754-2019's minimum and maximum: a NaN on any rank makes the result a NaN, and -0
// is less than +0; neither depends on which rank has which.
// Pure: no state, any thread.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>

namespace minddp {

// destination[i] = sources[0][i] op … op sources[count - 1][i] for i < numel. The destination is one
// of the sources, or overlaps none. REQUIRES: count >= 1
using ReduceFunction = void (*)(void* destination, const void* const* sources, int count, int64_t numel);

// SUM, PRODUCT, MIN, MAX for integers and real floating-point numbers, SUM and PRODUCT for complex
// ones, AVG (the sum divided by count) for both; BAND, BOR, BXOR for integers. For bool,
// SUM and MAX are "or", PRODUCT and MIN "and". Throws c10::TypeError for what has no meaning.
ReduceFunction reduce_function(c10d::ReduceOp::RedOpType op, at::ScalarType dtype);

}  // namespace minddp
