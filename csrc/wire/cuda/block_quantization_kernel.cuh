// Blocks of 8-bit codes on a GPU (support/block_quantization.h): a warp has a block, each of its lanes eight numbers.
// No launch and no CUDA call here, so that a test can compile this file for the CPU.
//
// A function below is one warp's work on one block. What it does is the CPU's, operation by operation and without
// fused multiply-add, so the codes are the CPU's to the bit. `Warp` is what the lanes do together:
//
//   warp.each(f)        f(lane, x) on each lane; x are the lane's eight numbers
//   warp.largest(f)     the maximum over the lanes of f(x), on each of them
#pragma once

#include "wire/block_codes.h"
#include "wire/block_quantization.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cmath>
#include <limits>

namespace minddp {
namespace cuda {

constexpr int kLanes = 32;
constexpr int kFour = 4;                                                    // that lie together in memory
constexpr int kMine = static_cast<int>(QuantizedBlock::kNumbers) / kLanes;  // a lane's numbers

// Two runs of four: neighbouring lanes read and write neighbouring memory.
__device__ inline int position(int lane, int i) { return i / kFour * kLanes * kFour + lane * kFour + i % kFour; }

__device__ inline float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);  // which is never fused with a sum
#else
  return a * b;
#endif
}

template <typename T>
struct alignas(sizeof(T) * kFour) Four {
  T values[kFour];
};

// Codes are four bytes of a word; blocks lie at multiples of four bytes.
__device__ inline Four<int8_t>& codes_of(QuantizedBlock* block, int lane, int run) {
  return reinterpret_cast<Four<int8_t>*>(block->codes)[run * kLanes + lane];
}
__device__ inline const Four<int8_t>& codes_of(const QuantizedBlock* block, int lane, int run) {
  return reinterpret_cast<const Four<int8_t>*>(block->codes)[run * kLanes + lane];
}

// code(i) for each of a lane's numbers.
template <typename Code>
__device__ void write_codes(QuantizedBlock* block, int lane, Code&& code) {
#pragma unroll
  for (int run = 0; run < kMine / kFour; ++run) {
    Four<int8_t> four;
#pragma unroll
    for (int k = 0; k < kFour; ++k) four.values[k] = static_cast<int8_t>(code(run * kFour + k));
    codes_of(block, lane, run) = four;
  }
}

// use(i, number, code) for each.
template <typename Use>
__device__ void read_codes(const QuantizedBlock* block, int lane, Use&& use) {
#pragma unroll
  for (int run = 0; run < kMine / kFour; ++run) {
    const Four<int8_t> four = codes_of(block, lane, run);
#pragma unroll
    for (int k = 0; k < kFour; ++k) use(run * kFour + k, four.values[k]);
  }
}

// use(i, number) for each.
template <typename Use>
__device__ void decode(const QuantizedBlock* block, int lane, Use&& use) {
  const float scale = block->scale;
  if (!std::signbit(scale))
    read_codes(block, lane, [&](int i, int8_t code) { use(i, product(static_cast<float>(code), scale)); });
  else
    read_codes(block, lane,
        [&](int i, int8_t code) { use(i, block_codes::value_of(code, product(static_cast<float>(code), -scale))); });
}

// The lane's numbers of `src`, times `scale`; zeros from `left` on.
template <typename T>
__device__ void load(const T* src, int64_t left, float scale, int lane, float* x) {
  const bool in_fours = left >= QuantizedBlock::kNumbers && reinterpret_cast<uintptr_t>(src) % alignof(Four<T>) == 0;
#pragma unroll
  for (int run = 0; run < kMine / kFour; ++run) {
    Four<T> four = {};
    const int first = position(lane, run * kFour);
    if (in_fours)
      four = *reinterpret_cast<const Four<T>*>(src + first);
    else
      for (int k = 0; k < kFour; ++k)
        if (first + k < left) four.values[k] = src[first + k];
#pragma unroll
    for (int k = 0; k < kFour; ++k) x[run * kFour + k] = product(static_cast<float>(four.values[k]), scale);
  }
}

// Its bits; `finite`: of the finite ones.
template <typename Warp>
__device__ uint32_t largest_magnitude(Warp& warp, bool finite = false) {
  return warp.largest([&](const float* x) {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const uint32_t bits = block_codes::magnitude(x[i]);
      if (bits > found && !(finite && bits >= block_codes::kInfinity)) found = bits;
    }
    return found;
  });
}

// The numbers become what rounding has lost of them.
template <typename Warp>
__device__ void encode_nearest(Warp& warp, uint32_t largest, QuantizedBlock* block) {
  const auto [scale, inverse] = block_codes::scale_for(largest);
  warp.each([&](int lane, float* x) {
    write_codes(block, lane, [&](int i) {
      using namespace block_codes;
      const auto code = static_cast<int8_t>(low_bits(product(x[i], inverse) + kRounds, kRounds));
      x[i] = x[i] - product(static_cast<float>(code), scale);
      return code;
    });
    if (lane == 0) block->scale = scale;
  });
}

// The upper eight of 16 bits travel, rounded; the lower eight, signed, are what that has lost.
template <typename Warp>
__device__ void encode_in_halves(Warp& warp, uint32_t largest, QuantizedBlock* block, QuantizedBlock* lost) {
  const auto [scale, inverse] = block_codes::scale_for(largest);
  warp.each([&](int lane, float* x) {
    int16_t fixed[kMine];
    for (int i = 0; i < kMine; ++i) {
      using namespace block_codes;
      fixed[i] = static_cast<int16_t>(low_bits(product(x[i], inverse) + kRoundsTo256ths, kRoundsTo256ths));
    }
    write_codes(block, lane, [&](int i) { return static_cast<int16_t>(fixed[i] + 128) >> 8; });
    write_codes(lost, lane, [&](int i) { return fixed[i]; });
    if (lane == 0) block->scale = scale, lost->scale = scale / 256;
  });
}

// What is not finite has codes of its own; the others are rounded to the nearest.
template <typename Warp>
__device__ void encode_with_special(Warp& warp, QuantizedBlock* block) {
  const float scale = block_codes::scale_beside_special(largest_magnitude(warp, /*finite=*/true));
  warp.each([&](int lane, float* x) {
    write_codes(block, lane, [&](int i) { return block_codes::special_code(x[i], scale); });
    if (lane == 0) block->scale = -scale;
  });
}

// `lost`, or null: error feedback.
template <typename Warp, typename T>
__device__ void quantize_block(
    Warp& warp, const T* src, int64_t left, float scale, QuantizedBlock* lost, QuantizedBlock* block) {
  warp.each([&](int lane, float* x) {
    load(src, left, scale, lane, x);
    if (lost != nullptr) decode(lost, lane, [&](int i, float number) { x[i] = x[i] + number; });
  });
  const uint32_t largest = largest_magnitude(warp);
  if (largest >= block_codes::kInfinity) {
    encode_with_special(warp, block);
    if (lost == nullptr) return;
    warp.each([&](int lane, float*) {
      write_codes(lost, lane, [](int) { return 0; });
      if (lane == 0) lost->scale = 0;
    });
  } else if (lost != nullptr) {
    encode_in_halves(warp, largest, block, lost);
  } else {
    encode_nearest(warp, largest, block);
  }
}

template <typename Warp, typename T>
__device__ void dequantize_block(Warp& warp, const QuantizedBlock* block, float scale, T* dst, int64_t left) {
  const bool in_fours = left >= QuantizedBlock::kNumbers && reinterpret_cast<uintptr_t>(dst) % alignof(Four<T>) == 0;
  warp.each([&](int lane, float* x) {
    decode(block, lane, [&](int i, float number) { x[i] = product(number, scale); });
    for (int run = 0; run < kMine / kFour; ++run) {
      const int first = position(lane, run * kFour);
      Four<T> four;
      for (int k = 0; k < kFour; ++k) four.values[k] = static_cast<T>(x[run * kFour + k]);
      if (in_fours)
        *reinterpret_cast<Four<T>*>(dst + first) = four;
      else
        for (int k = 0; k < kFour; ++k)
          if (first + k < left) dst[first + k] = four.values[k];
    }
  });
}

// The sum of `count` pieces, `stride` blocks apart, to the first. `lost`, or null: gets what that loses, added.
template <typename Warp>
__device__ void add_blocks(Warp& warp, QuantizedBlock* first, int count, int64_t stride, QuantizedBlock* lost) {
  warp.each([&](int lane, float* x) {
    decode(first, lane, [&](int i, float number) { x[i] = number; });
    for (int k = 1; k < count; ++k)
      decode(first + k * stride, lane, [&](int i, float number) { x[i] = x[i] + number; });
  });
  const uint32_t largest = largest_magnitude(warp);
  if (largest >= block_codes::kInfinity) return encode_with_special(warp, first);
  encode_nearest(warp, largest, first);
  if (lost == nullptr || largest == 0) return;
  warp.each([&](int lane, float* x) { decode(lost, lane, [&](int i, float number) { x[i] = x[i] + number; }); });
  encode_nearest(warp, largest_magnitude(warp), lost);
}

}  // namespace cuda
}  // namespace minddp
