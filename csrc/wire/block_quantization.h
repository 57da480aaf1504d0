// Floating point numbers in eight bits: blocks of 256 codes with one scale.
//
//   a block: int8_t code[256], float scale      260 bytes      value = code * |scale|
//
// The scale is the largest magnitude of the block / 127. A scale with a sign (-0, too) marks a block that holds what
// is not finite: there the codes 127, -127 and -128 mean infinity, -infinity and NaN, and the finite values of the
// block keep theirs, of 126 steps. Numbers are rounded to the nearest code, ties to the even one (with error
// feedback: to the nearest 1/256 of a step of a code, then to the nearest code, ties upwards). What is done with a
// number depends on its block alone, not on the processor. The CPU has loops, CUDA a kernel with the same bits
// (cuda/), other devices tensor operators. Pure.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace minddp {

struct QuantizedBlock {
  static constexpr int64_t kNumbers = 256;
  static int64_t count(int64_t numel) { return (numel + kNumbers - 1) / kNumbers; }

  int8_t codes[kNumbers];
  float scale;
};
static_assert(sizeof(QuantizedBlock) == 260);

// Encodes src * scale as blocks; the rest of the last one is zero. If `lost` is defined, it is added first, and
// becomes what rounding has lost: to 1/256 of a step, by tensor operators encoded as a block of its own. It is 0 for
// a block that holds what is not finite, and for one whose largest magnitude is below 1e-30. An undefined `src` is
// zeros, and `lost` stays. All lie in one piece of memory: `src` real floating point, `lost` and `blocks` bytes.
void quantize(const at::Tensor& src, double scale, const at::Tensor& lost, const at::Tensor& blocks);

// The numbers that `blocks` hold, times `scale`, to `dst`, in the order of its memory.
void dequantize(const at::Tensor& blocks, double scale, const at::Tensor& dst);

// Whether a block holds what is not finite: a tensor of one bool.
at::Tensor any_special(const at::Tensor& blocks);

// pieces[0] = pieces[0] + pieces[1] + ..., each of as many blocks: added in float, in this order, and quantized anew.
// What that has lost is added to `lost`, blocks of error feedback, where it is defined; a block that sums to zero, or
// to what is not finite, leaves `lost` as it is.
void add_quantized(const std::vector<at::Tensor>& pieces, const at::Tensor& lost);

}  // namespace minddp
