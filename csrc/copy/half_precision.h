// float16 and bfloat16 to float and back, by the hardware's conversions where there are such.
//
// Rounded to nearest even; the bits do not depend on the instruction set.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define MINDDP_HAS_AVX2_CLONES 1
#define MINDDP_AVX2 __attribute__((target("avx2,f16c")))
#endif
// One binary for every x86-64: the loader picks the AVX2 version where the machine has it. Without fused
// multiply-add, so that the bits are the same.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MINDDP_VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define MINDDP_VECTORIZED
#endif
// Inlined into the AVX2 version and into the plain one, each time compiled for that caller.
#define MINDDP_INLINE inline __attribute__((always_inline))

namespace minddp {
namespace {

// bfloat16 is the upper half of a float, rounded to nearest even; a NaN stays a NaN.
MINDDP_INLINE float from_bfloat16(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// REQUIRES: no NaN.
MINDDP_INLINE uint16_t finite_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

MINDDP_INLINE uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7fffffffu) > 0x7f800000u ? uint16_t{0x7fc0u} : finite_to_bfloat16(value);
}

template <bool>
MINDDP_INLINE void widen(const c10::BFloat16* source, float* wide, int64_t size) {
  const auto* bits = reinterpret_cast<const uint16_t*>(source);
  for (int64_t i = 0; i < size; ++i) wide[i] = from_bfloat16(bits[i]);
}

template <bool>
MINDDP_INLINE void narrow(const float* wide, c10::BFloat16* destination, int64_t size) {
  auto* bits = reinterpret_cast<uint16_t*>(destination);
  for (int64_t i = 0; i < size; ++i) bits[i] = to_bfloat16(wide[i]);
}

// The hardware's conversions, eight at a time; both return how many elements they did.
#ifdef MINDDP_HAS_AVX2_CLONES
MINDDP_AVX2 int64_t widen_f16c(const c10::Half* source, float* wide, int64_t size) {
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(halves));
  }
  return i;
}

MINDDP_AVX2 int64_t narrow_f16c(const float* wide, c10::Half* destination, int64_t size) {
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(wide + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(destination + i), halves);
  }
  return i;
}
#else
int64_t widen_f16c(const c10::Half*, float*, int64_t) { return 0; }
int64_t narrow_f16c(const float*, c10::Half*, int64_t) { return 0; }
#endif

template <bool kF16C>
MINDDP_INLINE void widen(const c10::Half* source, float* wide, int64_t size) {
  for (int64_t i = kF16C ? widen_f16c(source, wide, size) : 0; i < size; ++i) wide[i] = static_cast<float>(source[i]);
}

template <bool kF16C>
MINDDP_INLINE void narrow(const float* wide, c10::Half* destination, int64_t size) {
  for (int64_t i = kF16C ? narrow_f16c(wide, destination, size) : 0; i < size; ++i)
    destination[i] = static_cast<c10::Half>(wide[i]);
}

}  // namespace
}  // namespace minddp
