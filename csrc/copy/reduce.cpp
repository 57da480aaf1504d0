#include "reduce.h"

#include "half_precision.h"

#include <c10/core/ScalarType.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace minddp {
namespace {

using RedOp = c10d::ReduceOp::RedOpType;

// Elements combined at a time when there are more than two sources: the partial results of a block
// stay in the first-level cache.
constexpr int64_t kBlock = 1024;

// No conversion here uses fused multiply-add or reorders a sum: the bits must not depend on the
// instruction set, and for two ranks they are those of a plain a + b.
struct Sum {
  template <class T>
  static MINDDP_INLINE T combine(T a, T b) {
    return static_cast<T>(a + b);
  }
};
struct Product {
  template <class T>
  static MINDDP_INLINE T combine(T a, T b) {
    return static_cast<T>(a * b);
  }
};
template <class T>
MINDDP_INLINE bool is_negative(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    return std::bit_cast<Bits>(value) < 0;
  } else {
    return false;  // equal integers are the same
  }
}

// If either is a NaN the comparisons fail for a NaN on the right, and `a != a` holds for one on the left.
// Numbers that are equal are the same but for zeros, of which the sign decides.
struct Min {
  template <class T>
  static MINDDP_INLINE T combine(T a, T b) {
    return ((a < b) | (a != a) | ((a == b) & is_negative(a))) ? a : b;
  }
};
struct Max {
  template <class T>
  static MINDDP_INLINE T combine(T a, T b) {
    return ((a > b) | (a != a) | ((a == b) & !is_negative(a))) ? a : b;
  }
};
struct BitAnd {
  template <class T>
  static MINDDP_INLINE T combine(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct BitOr {
  template <class T>
  static MINDDP_INLINE T combine(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct BitXor {
  template <class T>
  static MINDDP_INLINE T combine(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};
struct Average : Sum {};

template <class Op, class T>
MINDDP_INLINE T finish(T value, [[maybe_unused]] int count) {
  if constexpr (std::is_same_v<Op, Average>)
    return value / static_cast<T>(static_cast<float>(count));
  else
    return value;
}

// --- elements that are combined in their own type ---

template <class Op, class T>
MINDDP_INLINE void reduce_two(T* destination, const T* a, const T* b, int64_t numel) {
  // The destination may be `a` or `b` itself, which no iteration but its own reads: hence ivdep.
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) destination[i] = finish<Op>(Op::combine(a[i], b[i]), 2);
}

template <class Op, class T>
MINDDP_INLINE void reduce_blocks(T* destination, const void* const* sources, int count, int64_t numel) {
  T block[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t size = std::min(kBlock, numel - begin);
    std::memcpy(block, static_cast<const T*>(sources[0]) + begin, static_cast<size_t>(size) * sizeof(T));
    for (int k = 1; k < count; ++k) {
      const T* source = static_cast<const T*>(sources[k]) + begin;
#pragma GCC ivdep
      for (int64_t i = 0; i < size; ++i) block[i] = Op::combine(block[i], source[i]);
    }
    T* out = destination + begin;
#pragma GCC ivdep
    for (int64_t i = 0; i < size; ++i) out[i] = finish<Op>(block[i], count);
  }
}

template <class Op, class T>
MINDDP_INLINE void reduce_same_type(void* destination, const void* const* sources, int count, int64_t numel) {
  T* out = static_cast<T*>(destination);
  if (count == 2)
    reduce_two<Op>(out, static_cast<const T*>(sources[0]), static_cast<const T*>(sources[1]), numel);
  else
    reduce_blocks<Op>(out, sources, count, numel);
}

// --- half and bfloat16, combined in float ---

template <class Op, class T, bool kF16C>
MINDDP_INLINE void reduce_widened(void* destination, const void* const* sources, int count, int64_t numel) {
  float block[kBlock];
  float next[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t size = std::min(kBlock, numel - begin);
    widen<kF16C>(static_cast<const T*>(sources[0]) + begin, block, size);
    for (int k = 1; k < count; ++k) {
      widen<kF16C>(static_cast<const T*>(sources[k]) + begin, next, size);
      for (int64_t i = 0; i < size; ++i) block[i] = Op::combine(block[i], next[i]);
    }
    for (int64_t i = 0; i < size; ++i) block[i] = finish<Op>(block[i], count);
    narrow<kF16C>(block, static_cast<T*>(destination) + begin, size);
  }
}

// --- one function per operation, element type and instruction set ---

template <class T>
constexpr bool kWidened = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

template <class Op, class T, bool kF16C>
MINDDP_INLINE void reduce_any(void* destination, const void* const* sources, int count, int64_t numel) {
  if constexpr (kWidened<T>)
    reduce_widened<Op, T, kF16C>(destination, sources, count, numel);
  else
    reduce_same_type<Op, T>(destination, sources, count, numel);
}

template <class Op, class T>
void reduce_plain(void* destination, const void* const* sources, int count, int64_t numel) {
  reduce_any<Op, T, false>(destination, sources, count, numel);
}

#ifdef MINDDP_HAS_AVX2_CLONES
template <class Op, class T>
MINDDP_AVX2 void reduce_avx2(void* destination, const void* const* sources, int count, int64_t numel) {
  reduce_any<Op, T, true>(destination, sources, count, numel);
}
#endif

template <class Op, class T>
ReduceFunction pick() {
#ifdef MINDDP_HAS_AVX2_CLONES
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return &reduce_avx2<Op, T>;
#endif
  return &reduce_plain<Op, T>;
}

[[noreturn]] void throw_unsupported(RedOp op, at::ScalarType dtype) {
  static const char* const kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  const char* name = static_cast<size_t>(op) < std::size(kNames) ? kNames[op] : "this reduction";
  C10_THROW_ERROR(
      TypeError, c10::str(name, " of ", c10::toString(dtype), " tensors has no meaning or is not supported"));
}

// A stored bool is the byte 0 or 1, so the bytes' own operations keep it one.
ReduceFunction pick_bool(RedOp op) {
  switch (op) {
    case RedOp::SUM:
    case RedOp::MAX:
    case RedOp::BOR: return pick<BitOr, uint8_t>();
    case RedOp::PRODUCT:
    case RedOp::MIN:
    case RedOp::BAND: return pick<BitAnd, uint8_t>();
    case RedOp::BXOR: return pick<BitXor, uint8_t>();
    default: throw_unsupported(op, at::ScalarType::Bool);
  }
}

// Sums and products of integers wrap around; two's complement makes unsigned arithmetic do for both signs.
template <class T, class Unsigned = std::make_unsigned_t<T>>
ReduceFunction pick_integer(RedOp op, at::ScalarType dtype) {
  switch (op) {
    case RedOp::SUM: return pick<Sum, Unsigned>();
    case RedOp::PRODUCT: return pick<Product, Unsigned>();
    case RedOp::MIN: return pick<Min, T>();
    case RedOp::MAX: return pick<Max, T>();
    case RedOp::BAND: return pick<BitAnd, Unsigned>();
    case RedOp::BOR: return pick<BitOr, Unsigned>();
    case RedOp::BXOR: return pick<BitXor, Unsigned>();
    default: throw_unsupported(op, dtype);
  }
}

// Any number that is no integer has these.
template <class T>
ReduceFunction pick_complex(RedOp op, at::ScalarType dtype) {
  switch (op) {
    case RedOp::SUM: return pick<Sum, T>();
    case RedOp::AVG: return pick<Average, T>();
    case RedOp::PRODUCT: return pick<Product, T>();
    default: throw_unsupported(op, dtype);
  }
}

template <class T>
ReduceFunction pick_real(RedOp op, at::ScalarType dtype) {
  if (op == RedOp::MIN) return pick<Min, T>();
  return op == RedOp::MAX ? pick<Max, T>() : pick_complex<T>(op, dtype);
}

}  // namespace

ReduceFunction reduce_function(RedOp op, at::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::Float: return pick_real<float>(op, dtype);
    case at::ScalarType::Double: return pick_real<double>(op, dtype);
    case at::ScalarType::Half: return pick_real<c10::Half>(op, dtype);
    case at::ScalarType::BFloat16: return pick_real<c10::BFloat16>(op, dtype);
    case at::ScalarType::ComplexFloat: return pick_complex<c10::complex<float>>(op, dtype);
    case at::ScalarType::ComplexDouble: return pick_complex<c10::complex<double>>(op, dtype);
    case at::ScalarType::Bool: return pick_bool(op);
    case at::ScalarType::Byte: return pick_integer<uint8_t>(op, dtype);
    case at::ScalarType::Char: return pick_integer<int8_t>(op, dtype);
    case at::ScalarType::Short: return pick_integer<int16_t>(op, dtype);
    case at::ScalarType::UInt16: return pick_integer<uint16_t>(op, dtype);
    case at::ScalarType::Int: return pick_integer<int32_t>(op, dtype);
    case at::ScalarType::UInt32: return pick_integer<uint32_t>(op, dtype);
    case at::ScalarType::Long: return pick_integer<int64_t>(op, dtype);
    case at::ScalarType::UInt64: return pick_integer<uint64_t>(op, dtype);
    default: throw_unsupported(op, dtype);
  }
}

}  // namespace minddp
