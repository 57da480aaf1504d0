// Floating point numbers in eight bits: blocks of 256 codes with one scale.
//
//   a block: int8_t code[256], float scale      260 bytes      value = code * |scale|
//
// The scale is the largest magnitude of the block / 127. A scale with a sign (-0, too) marks a block that holds what
// is not finite: there the codes 127, -127 and -128 mean infinity, -infinity and NaN, and the finite values of the
// block keep theirs, of 126 steps. What is done with a number depends on its block alone, not on the processor. Pure.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

namespace minddp {

struct QuantizedBlock {
  static constexpr int64_t kNumbers = 256;
  static int64_t count(int64_t numel) { return (numel + kNumbers - 1) / kNumbers; }

  int8_t codes[kNumbers];
  float scale;
};
static_assert(sizeof(QuantizedBlock) == 260);

// To the nearest code, ties to the even one; or, with a seed, up or down at random, so that the expected value is
// exact.
struct Rounding {
  bool stochastic = false;
  uint64_t seed = 0;  // the same seed gives the same codes
};

// Encodes `numel` numbers times `scale` as count(numel) blocks; the rest of the last one is zero. `lost`, where it is
// not null, has numel floats: they are added first, and become what rounding has lost (0 for what is not finite).
// src == nullptr: zeros, and `lost` stays. REQUIRES: a real floating point dtype.
void quantize(const void* src, at::ScalarType dtype, double scale, float* lost, int64_t numel, Rounding rounding,
    QuantizedBlock* blocks);

// The numbers that `blocks` hold, times `scale`.
void dequantize(const QuantizedBlock* blocks, double scale, void* dst, at::ScalarType dtype, int64_t numel);

// destination = sources[0] + ... + sources[count - 1], each of `blocks` blocks: added in float, in this order, and
// quantized anew. The destination is one of the sources, or overlaps none. `lost`, where it is not null, gets the 256
// floats by block that this has lost.
void add_quantized(QuantizedBlock* destination, const void* const* sources, int count, int64_t blocks,
    Rounding rounding, float* lost);

}  // namespace minddp
