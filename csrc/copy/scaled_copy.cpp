#include "scaled_copy.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>

#include "half_precision.h"
#include "streaming.h"
#include "grouped_copy.h"

#ifdef MINDDP_WITH_CUDA
#include "cuda/scaled_copy.h"
#endif

namespace minddp {
namespace {

// Larger segments do not stay in a core's own caches until their reader comes.
constexpr int64_t kStreamFrom = 1 << 20;  // bytes

MINDDP_VECTORIZED
void scale_float(const float* src, float* dst, int64_t n, float scale) {
  if (n * int64_t(sizeof(float)) >= kStreamFrom) return stream_scale(dst, src, n, scale);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dst[i] = src[i] * scale;
}

MINDDP_VECTORIZED
void scale_double(const double* src, double* dst, int64_t n, double scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dst[i] = src[i] * scale;
}

MINDDP_VECTORIZED
void scale_bfloat16(const uint16_t* src, uint16_t* dst, int64_t n, float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dst[i] = to_bfloat16(from_bfloat16(src[i]) * scale);
}

MINDDP_VECTORIZED
void bfloat16_to_float(const uint16_t* src, float* dst, int64_t n, float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dst[i] = from_bfloat16(src[i]) * scale;
}

MINDDP_VECTORIZED
void float_to_bfloat16(const float* src, uint16_t* dst, int64_t n, float scale) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dst[i] = to_bfloat16(src[i] * scale);
}

// Through blocks of floats that stay in the first-level cache. Src and Dst: float or Half.
template <bool kF16C, class Src, class Dst>
MINDDP_INLINE void convert(const Src* src, Dst* dst, int64_t n, float scale) {
  constexpr int64_t kFloats = 1024;
  float block[kFloats];
  for (int64_t begin = 0; begin < n; begin += kFloats) {
    const int64_t size = std::min(kFloats, n - begin);
    if constexpr (std::is_same_v<Src, c10::Half>) {
      widen<kF16C>(src + begin, block, size);
      for (int64_t i = 0; i < size; ++i) block[i] *= scale;
    } else {
      for (int64_t i = 0; i < size; ++i) block[i] = src[begin + i] * scale;
    }
    if constexpr (std::is_same_v<Dst, c10::Half>)
      narrow<kF16C>(block, dst + begin, size);
    else
      std::memcpy(dst + begin, block, size_t(size) * sizeof(float));
  }
}

#ifdef MINDDP_HAS_AVX2_CLONES
template <class Src, class Dst>
MINDDP_AVX2 void convert_avx2(const Src* src, Dst* dst, int64_t n, float scale) {
  convert<true>(src, dst, n, scale);
}
#endif

template <class Src, class Dst>
void convert_half(const void* src, void* dst, int64_t n, float scale) {
  const auto* from = static_cast<const Src*>(src);
  auto* to = static_cast<Dst*>(dst);
#ifdef MINDDP_HAS_AVX2_CLONES
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return convert_avx2(from, to, n, scale);
#endif
  convert<false>(from, to, n, scale);
}

void copy_one(const CopySegment& s, at::ScalarType src_type, at::ScalarType dst_type, double scale) {
  using at::ScalarType;
  if (s.numel == 0) return;  // and has no memory
  if (s.src == nullptr) {
    std::memset(s.dst, 0, s.numel * at::elementSize(dst_type));
  } else if (src_type == dst_type && scale == 1.0) {
    int64_t bytes = s.numel * int64_t(at::elementSize(dst_type));
    if (s.src != s.dst)
      bytes < kStreamFrom ? void(std::memcpy(s.dst, s.src, bytes)) : stream_copy(s.dst, s.src, bytes);
  } else if (src_type == dst_type && (src_type == at::kFloat || src_type == at::kComplexFloat)) {
    int64_t n = src_type == at::kFloat ? s.numel : 2 * s.numel;
    scale_float(static_cast<const float*>(s.src), static_cast<float*>(s.dst), n, float(scale));
  } else if (src_type == dst_type && (src_type == at::kDouble || src_type == at::kComplexDouble)) {
    int64_t n = src_type == at::kDouble ? s.numel : 2 * s.numel;
    scale_double(static_cast<const double*>(s.src), static_cast<double*>(s.dst), n, scale);
  } else if (src_type == at::kBFloat16 && dst_type == at::kBFloat16) {
    scale_bfloat16(static_cast<const uint16_t*>(s.src), static_cast<uint16_t*>(s.dst), s.numel, float(scale));
  } else if (src_type == at::kBFloat16 && dst_type == at::kFloat) {
    bfloat16_to_float(static_cast<const uint16_t*>(s.src), static_cast<float*>(s.dst), s.numel, float(scale));
  } else if (src_type == at::kFloat && dst_type == at::kBFloat16) {
    float_to_bfloat16(static_cast<const float*>(s.src), static_cast<uint16_t*>(s.dst), s.numel, float(scale));
  } else if (src_type == at::kHalf && dst_type == at::kHalf) {
    convert_half<c10::Half, c10::Half>(s.src, s.dst, s.numel, float(scale));
  } else if (src_type == at::kHalf && dst_type == at::kFloat) {
    convert_half<c10::Half, float>(s.src, s.dst, s.numel, float(scale));
  } else if (src_type == at::kFloat && dst_type == at::kHalf) {
    convert_half<float, c10::Half>(s.src, s.dst, s.numel, float(scale));
  } else {
    scaled_copy_reference(s, at::kCPU, src_type, dst_type, scale);
  }
}

}  // namespace

void scaled_copy_reference(
    const CopySegment& s, at::Device device, at::ScalarType src_type, at::ScalarType dst_type, double scale) {
  at::Tensor dst = at::from_blob(s.dst, {s.numel}, at::dtype(dst_type).device(device));
  if (s.src == nullptr) {
    dst.zero_();
    return;
  }
  at::Tensor src = at::from_blob(const_cast<void*>(s.src), {s.numel}, at::dtype(src_type).device(device));
  if (scale == 1.0)
    dst.copy_(src);
  else if (src_type == dst_type)
    at::mul_out(dst, src, at::native::wrapped_scalar_tensor(scale));
  else
    dst.copy_(src.to(at::promote_types(at::promote_types(src_type, dst_type), at::kFloat)).mul(scale));
}

void scaled_copy(const std::vector<CopySegment>& segments, at::Device device, at::ScalarType src, at::ScalarType dst,
    double scale) {
  if (segments.empty()) return;
#ifdef MINDDP_WITH_CUDA
  if (device.is_cuda() && cuda::covers(device.index()))
    return cuda::scaled_copy(segments, src, dst, scale, device.index());
#endif
  if (!device.is_cpu()) return grouped_copy(segments, device, src, dst, scale);
  for (const CopySegment& s : segments) copy_one(s, src, dst, scale);
}

}  // namespace minddp
