#include "support/block_quantization.h"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

// One binary for every x86-64: the loader picks the AVX2 version where the machine has it. Without fused
// multiply-add, so that the bits are the same.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MINDDP_BLOCK_LOOP __attribute__((target_clones("avx2", "default")))
#else
#define MINDDP_BLOCK_LOOP
#endif

namespace minddp {
namespace {

constexpr int64_t kN = QuantizedBlock::kNumbers;
constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
// Added to a small number, it leaves the number's nearest integer, ties to even, in the low bits.
constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23
// Of a block that is smaller, the scale would be too small to be divided by: it travels as zeros.
constexpr float kSmallest = 1e-30f;

enum Code : int8_t { kPlus = 127, kMinus = -127, kNaN = -128 };

// A number in [-0.5, 0.5) by position: a finalizer of MurmurHash3 over the position and the seed.
inline float noise(uint32_t position, uint32_t seed) {
  uint32_t h = position * 0x9e3779b9u ^ seed;
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  h ^= h >> 16;
  return float(int32_t(h >> 8)) * (1.0f / 16777216.0f) - 0.5f;
}

MINDDP_BLOCK_LOOP
uint32_t largest_magnitude(const float* x) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < kN; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & kMagnitude);
  return largest;
}

MINDDP_BLOCK_LOOP
void encode_nearest(const float* x, float scale, float inverse, QuantizedBlock* block) {
  for (int64_t i = 0; i < kN; ++i) {
    const float moved = x[i] * inverse + kRounds;
    block->codes[i] = static_cast<int8_t>(std::bit_cast<int32_t>(moved) - std::bit_cast<int32_t>(kRounds));
  }
  block->scale = scale;
}

MINDDP_BLOCK_LOOP
void encode_stochastic(const float* x, float scale, float inverse, uint32_t seed, QuantizedBlock* block) {
  for (int64_t i = 0; i < kN; ++i) {
    const float moved = x[i] * inverse + noise(uint32_t(i), seed) + kRounds;
    const int32_t code = std::bit_cast<int32_t>(moved) - std::bit_cast<int32_t>(kRounds);
    block->codes[i] = static_cast<int8_t>(std::min(std::max(code, -127), 127));
  }
  block->scale = scale;
}

MINDDP_BLOCK_LOOP
void subtract(const QuantizedBlock* block, const float* x, float* lost) {
  const float scale = block->scale;
  for (int64_t i = 0; i < kN; ++i) lost[i] = x[i] - float(block->codes[i]) * scale;
}

MINDDP_BLOCK_LOOP
void decode(const QuantizedBlock* block, float* x) {
  const float scale = block->scale;
  for (int64_t i = 0; i < kN; ++i) x[i] = float(block->codes[i]) * scale;
}

MINDDP_BLOCK_LOOP
void decode_and_add(const QuantizedBlock* block, float* sum) {
  const float scale = block->scale;
  for (int64_t i = 0; i < kN; ++i) sum[i] = sum[i] + float(block->codes[i]) * scale;
}

float value_of(int8_t code, float scale) {
  if (code == kPlus) return std::numeric_limits<float>::infinity();
  if (code == kMinus) return -std::numeric_limits<float>::infinity();
  if (code == kNaN) return std::numeric_limits<float>::quiet_NaN();
  return float(code) * scale;
}

// What is not finite has codes of its own; the others are rounded to the nearest.
void encode_special(const float* x, QuantizedBlock* block, float* lost) {
  float largest = 0;
  for (int64_t i = 0; i < kN; ++i)
    if (std::isfinite(x[i])) largest = std::max(largest, std::fabs(x[i]));
  const float scale = largest < kSmallest ? 0.0f : largest / 126;
  block->scale = -scale;
  for (int64_t i = 0; i < kN; ++i) {
    int8_t& code = block->codes[i];
    if (std::isnan(x[i]))
      code = kNaN;
    else if (std::isinf(x[i]))
      code = x[i] > 0 ? kPlus : kMinus;
    else
      code = scale == 0 ? 0 : static_cast<int8_t>(std::nearbyint(x[i] / scale));
    if (lost) lost[i] = std::isfinite(x[i]) ? x[i] - float(code) * scale : 0.0f;
  }
}

void encode(const float* x, Rounding rounding, uint64_t position, QuantizedBlock* block, float* lost) {
  const uint32_t largest = largest_magnitude(x);
  if (largest >= kInfinity) return encode_special(x, block, lost);
  const float magnitude = std::bit_cast<float>(largest);
  const bool small = magnitude < kSmallest;
  const float scale = small ? 0.0f : magnitude / 127, inverse = small ? 0.0f : 127 / magnitude;
  if (rounding.stochastic && !small) {
    const uint64_t mixed = (rounding.seed * 0xbf58476d1ce4e5b9u + position) * 0x9e3779b97f4a7c15u;
    encode_stochastic(x, scale, inverse, uint32_t(mixed >> 32), block);
  } else
    encode_nearest(x, scale, inverse, block);
  if (lost) subtract(block, x, lost);
}

void decode_any(const QuantizedBlock* block, float* x) {
  if (!std::signbit(block->scale)) return decode(block, x);
  for (int64_t i = 0; i < kN; ++i) x[i] = value_of(block->codes[i], -block->scale);
}

MINDDP_BLOCK_LOOP
void load(const float* src, float scale, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = src[i] * scale;
}

template <class T>
void load(const T* src, float scale, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(src[i]) * scale;
}

MINDDP_BLOCK_LOOP
void store(const float* x, float scale, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = x[i] * scale;
}

template <class T>
void store(const float* x, float scale, int64_t n, T* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<T>(x[i] * scale);
}

MINDDP_BLOCK_LOOP
void add(const float* other, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] + other[i];
}

template <class T>
void quantize_as(const T* src, float scale, float* lost, int64_t numel, Rounding rounding, QuantizedBlock* blocks) {
  alignas(64) float x[kN], left[kN];
  for (int64_t begin = 0; begin < numel; begin += kN) {
    const int64_t n = std::min(kN, numel - begin);
    if (n < kN) std::fill(x + n, x + kN, 0.0f);
    load(src + begin, scale, n, x);
    if (lost) add(lost + begin, n, x);
    encode(x, rounding, uint64_t(begin / kN), &blocks[begin / kN], lost ? left : nullptr);
    if (lost) std::copy(left, left + n, lost + begin);
  }
}

template <class T>
void dequantize_as(const QuantizedBlock* blocks, float scale, T* dst, int64_t numel) {
  alignas(64) float x[kN];
  for (int64_t begin = 0; begin < numel; begin += kN) {
    decode_any(&blocks[begin / kN], x);
    store(x, scale, std::min(kN, numel - begin), dst + begin);
  }
}

}  // namespace

void quantize(const void* src, at::ScalarType dtype, double scale, float* lost, int64_t numel, Rounding rounding,
    QuantizedBlock* blocks) {
  if (src == nullptr) return void(std::memset(blocks, 0, size_t(QuantizedBlock::count(numel)) * sizeof(*blocks)));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "minddp: quantize",
      [&] { quantize_as(static_cast<const scalar_t*>(src), float(scale), lost, numel, rounding, blocks); });
}

void dequantize(const QuantizedBlock* blocks, double scale, void* dst, at::ScalarType dtype, int64_t numel) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "minddp: dequantize",
      [&] { dequantize_as(blocks, float(scale), static_cast<scalar_t*>(dst), numel); });
}

void add_quantized(QuantizedBlock* destination, const void* const* sources, int count, int64_t blocks,
    Rounding rounding, float* lost) {
  alignas(64) float sum[kN], next[kN];
  for (int64_t b = 0; b < blocks; ++b) {
    for (int k = 0; k < count; ++k) {
      const QuantizedBlock* block = static_cast<const QuantizedBlock*>(sources[k]) + b;
      if (k == 0) {
        decode_any(block, sum);
      } else if (!std::signbit(block->scale)) {
        decode_and_add(block, sum);
      } else {
        decode_any(block, next);
        add(next, kN, sum);
      }
    }
    encode(sum, rounding, uint64_t(b), &destination[b], lost ? lost + b * kN : nullptr);
  }
}

}  // namespace minddp
