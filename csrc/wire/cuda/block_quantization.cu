#include "block_quantization.h"

#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "block_quantization_kernel.cuh"

namespace minddp {
namespace cuda {
namespace {

constexpr int kWarps = 8;  // of a thread block

struct DeviceWarp {
  float x[kMine];

  template <typename Each>
  __device__ void each(Each&& f) {
    f(static_cast<int>(threadIdx.x % kLanes), x);
  }
  template <typename Largest>
  __device__ uint32_t largest(Largest&& f) {
    uint32_t found = f(x);
#pragma unroll
    for (int other = kLanes / 2; other > 0; other /= 2)
      found = max(found, __shfl_xor_sync(0xffffffffu, found, other));
    return found;
  }
};

// work(warp, block) for each of `count` blocks.
template <typename Work>
__global__ void __launch_bounds__(kWarps* kLanes) for_each_block(int64_t count, const Work work) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t block = blockIdx.x * int64_t(kWarps) + threadIdx.x / kLanes; block < count; block += step) {
    DeviceWarp warp;
    work(warp, block);
  }
}

template <typename Work>
void launch(c10::DeviceIndex device, int64_t count, const Work& work) {
  constexpr int64_t kMost = int64_t(1) << 30;
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(std::min((count + kWarps - 1) / kWarps, kMost));
  for_each_block<<<blocks, kWarps * kLanes, 0, c10::cuda::getCurrentCUDAStream(device)>>>(count, work);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

QuantizedBlock* blocks_of(const at::Tensor& bytes) { return static_cast<QuantizedBlock*>(bytes.mutable_data_ptr()); }

template <typename T>
struct Quantize {
  const T* src;
  int64_t numel;
  float scale;
  QuantizedBlock *lost, *blocks;

  __device__ void operator()(DeviceWarp& warp, int64_t block) const {
    const int64_t begin = block * QuantizedBlock::kNumbers;
    quantize_block(warp, src + begin, numel - begin, scale, lost ? lost + block : nullptr, blocks + block);
  }
};

template <typename T>
struct Dequantize {
  const QuantizedBlock* blocks;
  float scale;
  T* dst;
  int64_t numel;

  __device__ void operator()(DeviceWarp& warp, int64_t block) const {
    const int64_t begin = block * QuantizedBlock::kNumbers;
    dequantize_block(warp, blocks + block, scale, dst + begin, numel - begin);
  }
};

struct Add {
  QuantizedBlock* first;
  int count;
  int64_t stride;
  QuantizedBlock* lost;

  __device__ void operator()(DeviceWarp& warp, int64_t block) const {
    add_blocks(warp, first + block, count, stride, lost ? lost + block : nullptr);
  }
};

}  // namespace

void quantize(const at::Tensor& src, double scale, const at::Tensor& lost, const at::Tensor& blocks) {
  const c10::cuda::CUDAGuard guard(src.device());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, src.scalar_type(), "minddp: quantize", [&] {
    launch(src.device().index(), QuantizedBlock::count(src.numel()),
        Quantize<scalar_t>{src.const_data_ptr<scalar_t>(), src.numel(), static_cast<float>(scale),
            lost.defined() ? blocks_of(lost) : nullptr, blocks_of(blocks)});
  });
}

void dequantize(const at::Tensor& blocks, double scale, const at::Tensor& dst) {
  const c10::cuda::CUDAGuard guard(dst.device());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dst.scalar_type(), "minddp: dequantize", [&] {
    launch(dst.device().index(), QuantizedBlock::count(dst.numel()),
        Dequantize<scalar_t>{
            blocks_of(blocks), static_cast<float>(scale), dst.mutable_data_ptr<scalar_t>(), dst.numel()});
  });
}

void add_quantized(const std::vector<at::Tensor>& pieces, const at::Tensor& lost) {
  const at::Tensor& first = pieces[0];
  const c10::cuda::CUDAGuard guard(first.device());
  const int64_t stride = pieces.size() < 2 ? 0 : blocks_of(pieces[1]) - blocks_of(first);
  launch(first.device().index(), first.numel() / static_cast<int64_t>(sizeof(QuantizedBlock)),
      Add{blocks_of(first), static_cast<int>(pieces.size()), stride, lost.defined() ? blocks_of(lost) : nullptr});
}

}  // namespace cuda
}  // namespace minddp
