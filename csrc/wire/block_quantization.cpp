#include "block_quantization.h"

#include "cuda/block_quantization.h"
#include "copy/cuda/scaled_copy.h"
#include "copy/half_precision.h"
#include "block_codes.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace minddp {
namespace {

#ifdef MINDDP_WITH_CUDA
constexpr bool kWithKernel = true;
#else
constexpr bool kWithKernel = false;
#endif
constexpr int64_t kN = QuantizedBlock::kNumbers;
using namespace block_codes;

MINDDP_VECTORIZED
uint32_t largest_magnitude(const float* x) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < kN; ++i) largest = std::max(largest, magnitude(x[i]));
  return largest;
}

// x = src * scale + lost, of a whole block; returns the largest magnitude's bits.
MINDDP_VECTORIZED
uint32_t load_block(const float* src, float scale, const QuantizedBlock* lost, float* x) {
  uint32_t largest = 0;
  const float step = lost->scale;
  for (int64_t i = 0; i < kN; ++i) {
    const float value = src[i] * scale + float(lost->codes[i]) * step;
    x[i] = value;
    largest = std::max(largest, magnitude(value));
  }
  return largest;
}

MINDDP_VECTORIZED
void encode_nearest(const float* x, float scale, float inverse, QuantizedBlock* block) {
  for (int64_t i = 0; i < kN; ++i) block->codes[i] = static_cast<int8_t>(low_bits(x[i] * inverse + kRounds, kRounds));
  block->scale = scale;
}

// With error feedback: a number becomes 16 bits. The upper eight, rounded, travel. The lower eight, signed, are what
// that has lost.
MINDDP_VECTORIZED
void encode_in_halves(const float* x, float scale, float inverse, QuantizedBlock* block, QuantizedBlock* lost) {
  alignas(64) int16_t fixed[kN];
  for (int64_t i = 0; i < kN; ++i)
    fixed[i] = static_cast<int16_t>(std::bit_cast<int32_t>(x[i] * inverse + kRoundsTo256ths));
  for (int64_t i = 0; i < kN; ++i) block->codes[i] = static_cast<int8_t>(static_cast<int16_t>(fixed[i] + 128) >> 8);
  for (int64_t i = 0; i < kN; ++i) lost->codes[i] = static_cast<int8_t>(fixed[i]);
  block->scale = scale;
  lost->scale = scale / 256;
}

MINDDP_VECTORIZED
void subtract(const QuantizedBlock* block, const float* x, float* lost) {
  const float scale = block->scale;
  for (int64_t i = 0; i < kN; ++i) lost[i] = x[i] - float(block->codes[i]) * scale;
}

MINDDP_VECTORIZED
void decode(const QuantizedBlock* block, float* x) {
  const float scale = block->scale;
  for (int64_t i = 0; i < kN; ++i) x[i] = float(block->codes[i]) * scale;
}

MINDDP_VECTORIZED
void decode_and_add(const QuantizedBlock* block, float* sum) {
  const float scale = block->scale;
  for (int64_t i = 0; i < kN; ++i) sum[i] = sum[i] + float(block->codes[i]) * scale;
}

// What is not finite has codes of its own; the others are rounded to the nearest.
void encode_special(const float* x, QuantizedBlock* block) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < kN; ++i)
    if (magnitude(x[i]) < kInfinity) largest = std::max(largest, magnitude(x[i]));
  const float scale = scale_beside_special(largest);
  block->scale = -scale;
  for (int64_t i = 0; i < kN; ++i) block->codes[i] = special_code(x[i], scale);
}

// `lost`, 256 floats or null, gets what rounding loses.
void encode(const float* x, uint32_t largest, QuantizedBlock* block, float* lost = nullptr) {
  if (largest >= kInfinity) {
    if (lost) std::fill(lost, lost + kN, 0.0f);
    return encode_special(x, block);
  }
  const auto [scale, inverse] = scale_for(largest);
  encode_nearest(x, scale, inverse, block);
  if (lost) subtract(block, x, lost);
}

// `left`, 256 floats, is kept for the next iteration.
void keep(const float* left, QuantizedBlock* lost) { encode(left, largest_magnitude(left), lost); }

// The same as encode(); what rounding loses is kept: nothing of what is not finite.
void encode_and_keep(const float* x, uint32_t largest, QuantizedBlock* block, QuantizedBlock* lost) {
  if (largest < kInfinity) {
    const auto [scale, inverse] = scale_for(largest);
    return encode_in_halves(x, scale, inverse, block, lost);
  }
  encode_special(x, block);
  *lost = QuantizedBlock();
}

void decode_any(const QuantizedBlock* block, float* x) {
  if (!std::signbit(block->scale)) return decode(block, x);
  for (int64_t i = 0; i < kN; ++i) x[i] = value_of(block->codes[i], float(block->codes[i]) * -block->scale);
}

MINDDP_VECTORIZED
void load(const float* src, float scale, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = src[i] * scale;
}

template <class T>
void load(const T* src, float scale, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(src[i]) * scale;
}

MINDDP_VECTORIZED
void store(const float* x, float scale, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = x[i] * scale;
}

template <class T>
void store(const float* x, float scale, int64_t n, T* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<T>(x[i] * scale);
}

MINDDP_VECTORIZED
void add(const float* other, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] + other[i];
}

// A block is too short for the processor to see that the next one follows: its memory is asked for two blocks ahead.
template <class T>
inline void prefetch(const T* src, const QuantizedBlock* lost, const QuantizedBlock* block) {
#if defined(__GNUC__)
  constexpr int64_t kLine = 64, kAhead = 2;
  auto ask = [](const auto* memory, int64_t bytes, auto writes) {
    const char* next = reinterpret_cast<const char*>(memory) + kAhead * bytes;
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(next + i, writes.value);
  };
  ask(src, kN * int64_t(sizeof(T)), std::false_type());
  if (lost) ask(lost, int64_t(sizeof(QuantizedBlock)), std::true_type());
  ask(block, int64_t(sizeof(QuantizedBlock)), std::true_type());
#endif
}

template <class T>
void quantize_as(const T* src, float scale, QuantizedBlock* lost, int64_t numel, QuantizedBlock* blocks) {
  alignas(64) float x[kN];
  for (int64_t begin = 0; begin < numel; begin += kN, ++blocks) {
    const int64_t n = std::min(kN, numel - begin);
    prefetch(src + begin, lost, blocks);
    uint32_t largest = 0;
    if constexpr (std::is_same_v<T, float>)  // the usual case, in one pass
      if (lost && n == kN) largest = load_block(src + begin, scale, lost, x);
    if (largest == 0) {
      if (n < kN) std::fill(x + n, x + kN, 0.0f);
      load(src + begin, scale, n, x);
      if (lost) decode_and_add(lost, x);
      largest = largest_magnitude(x);
    }
    if (lost)
      encode_and_keep(x, largest, blocks, lost++);
    else
      encode(x, largest, blocks);
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

QuantizedBlock* blocks_of(const at::Tensor& bytes) { return static_cast<QuantizedBlock*>(bytes.mutable_data_ptr()); }

void add_on_host(const std::vector<at::Tensor>& pieces, QuantizedBlock* lost) {
  alignas(64) float sum[kN], next[kN];
  const int64_t blocks = pieces[0].numel() / int64_t(sizeof(QuantizedBlock));
  for (int64_t b = 0; b < blocks; ++b) {
    decode_any(blocks_of(pieces[0]) + b, sum);
    for (size_t k = 1; k < pieces.size(); ++k) {
      const QuantizedBlock* block = blocks_of(pieces[k]) + b;
      if (!std::signbit(block->scale)) {
        decode_and_add(block, sum);
      } else {
        decode_any(block, next);
        add(next, kN, sum);
      }
    }
    const uint32_t largest = largest_magnitude(sum);
    const bool feeds_back = lost && largest > 0 && largest < kInfinity;
    encode(sum, largest, blocks_of(pieces[0]) + b, feeds_back ? next : nullptr);
    if (!feeds_back) continue;
    decode_and_add(lost + b, next);
    keep(next, lost + b);
  }
}

// --- elsewhere: on a GPU by the kernel, or else by tensor operators

bool has_kernel(const at::Tensor& tensor) {
  if constexpr (kWithKernel) return tensor.is_cuda() && cuda::covers(tensor.device().index());
  return false;
}

at::Tensor rows_of(const at::Tensor& bytes) { return bytes.view({-1, int64_t(sizeof(QuantizedBlock))}); }

// In the order of memory.
at::Tensor flat(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); }

at::Tensor decoded(const at::Tensor& bytes) {
  const at::Tensor rows = rows_of(bytes);
  const at::Tensor codes = rows.narrow(1, 0, kN).contiguous().view(at::kChar);
  const at::Tensor scale = rows.narrow(1, kN, sizeof(float)).contiguous().view(at::kFloat);
  const at::Tensor special = at::signbit(scale);
  at::Tensor values = codes.to(at::kFloat) * scale.abs();
  const double infinity = std::numeric_limits<double>::infinity();
  values = values.masked_fill(special & (codes == kPlus), infinity);
  values = values.masked_fill(special & (codes == kMinus), -infinity);
  return values.masked_fill(special & (codes == kNaN), std::numeric_limits<double>::quiet_NaN());
}

// `values`: 256 a row. Returns what was lost.
at::Tensor encode_rows(const at::Tensor& values, const at::Tensor& bytes) {
  const at::Tensor finite = at::isfinite(values), numbers = values.masked_fill(~finite, 0);
  const at::Tensor special = ~finite.all(1, /*keepdim=*/true);
  const at::Tensor steps = at::full_like(special, 127, at::kFloat).masked_fill(special, 126);
  const at::Tensor largest = numbers.abs().amax(1, /*keepdim=*/true), small = largest < kSmallest;
  const at::Tensor scale = (largest / steps).masked_fill(small, 0);
  const at::Tensor rounded = at::round(numbers * (steps / largest).masked_fill(small, 0));
  at::Tensor codes = rounded.masked_fill(values == std::numeric_limits<double>::infinity(), kPlus);
  codes = codes.masked_fill(values == -std::numeric_limits<double>::infinity(), kMinus);
  codes = codes.masked_fill(at::isnan(values), kNaN);
  const at::Tensor rows = rows_of(bytes);
  rows.narrow(1, 0, kN).copy_(codes.to(at::kChar).view(at::kByte));
  rows.narrow(1, kN, sizeof(float)).copy_(at::where(special, scale.neg(), scale).view(at::kByte));
  return (numbers - rounded * scale).masked_fill(special, 0);
}

}  // namespace

void quantize(const at::Tensor& src, double scale, const at::Tensor& lost, const at::Tensor& blocks) {
  if (!src.defined()) return void(blocks.zero_());
  if (src.is_cpu()) {
    QuantizedBlock* feedback = lost.defined() ? blocks_of(lost) : nullptr;
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, src.scalar_type(), "minddp: quantize",
        [&] { quantize_as(src.const_data_ptr<scalar_t>(), float(scale), feedback, src.numel(), blocks_of(blocks)); });
    return;
  }
  if constexpr (kWithKernel)
    if (has_kernel(src)) return cuda::quantize(src, scale, lost, blocks);
  const int64_t rest = QuantizedBlock::count(src.numel()) * kN - src.numel();
  const at::Tensor numbers = at::constant_pad_nd(flat(src).to(at::kFloat) * scale, {0, rest}).view({-1, kN});
  const at::Tensor left = encode_rows(lost.defined() ? numbers + decoded(lost) : numbers, blocks);
  if (lost.defined()) encode_rows(left, lost);
}

void dequantize(const at::Tensor& blocks, double scale, const at::Tensor& dst) {
  if constexpr (kWithKernel)
    if (has_kernel(dst)) return cuda::dequantize(blocks, scale, dst);
  if (!dst.is_cpu()) return void(flat(dst).copy_(decoded(blocks).view({-1}).narrow(0, 0, dst.numel()).mul_(scale)));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dst.scalar_type(), "minddp: dequantize",
      [&] { dequantize_as(blocks_of(blocks), float(scale), dst.mutable_data_ptr<scalar_t>(), dst.numel()); });
}

at::Tensor any_special(const at::Tensor& blocks) {
  return at::signbit(rows_of(blocks).narrow(1, kN, sizeof(float)).contiguous().view(at::kFloat)).any();
}

void add_quantized(const std::vector<at::Tensor>& pieces, const at::Tensor& lost) {
  if (pieces[0].is_cpu()) return add_on_host(pieces, lost.defined() ? blocks_of(lost) : nullptr);
  if constexpr (kWithKernel)
    if (has_kernel(pieces[0])) return cuda::add_quantized(pieces, lost);
  at::Tensor sum = decoded(pieces[0]);
  for (size_t k = 1; k < pieces.size(); ++k) sum.add_(decoded(pieces[k]));
  const at::Tensor left = encode_rows(sum, pieces[0]);
  if (!lost.defined()) return;
  const at::Tensor fed = at::empty_like(lost), kept = rows_of(lost);
  encode_rows(decoded(lost) + left, fed);
  const at::Tensor feeds_back = at::isfinite(sum).all(1, /*keepdim=*/true) & sum.any(1, /*keepdim=*/true);
  kept.copy_(at::where(feeds_back, rows_of(fed), kept));
}

}  // namespace minddp
