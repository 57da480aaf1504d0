// Blocks of 8-bit codes on a GPU: the functions of support/block_quantization.h, each one launch of a kernel on the
// current stream. The codes are the CPU's to the bit. Needs no header of the CUDA toolkit. Any thread may call it.
//
// REQUIRES: covers(device) (scaled_copy.h); memory as the functions there want it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace minddp {
namespace cuda {

void quantize(const at::Tensor& src, double scale, const at::Tensor& lost, const at::Tensor& blocks);
void dequantize(const at::Tensor& blocks, double scale, const at::Tensor& dst);
// `pieces`: as far from each other in memory as the second is from the first.
void add_quantized(const std::vector<at::Tensor>& pieces, const at::Tensor& lost);

}  // namespace cuda
}  // namespace minddp
