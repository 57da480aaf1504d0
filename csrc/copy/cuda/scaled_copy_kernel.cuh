// The kernel of scaled_copy.h and the choice of its types. No launch and no CUDA call here, so that a
// test can compile this file for the CPU and run it block by block and thread by thread.
//
// Threads share nothing and never wait for each other: each loads, converts and stores its own
// elements. Values are loaded in batches before any of the batch is stored, because the compiler
// must assume that a store changes what a later load reads, and would wait for every load in turn.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "segment_table.h"

namespace minddp {
namespace cuda {

// The table travels in the kernel's parameters where it fits: no upload, no memory to keep alive.
template <int kCapacity>
struct InlineTable {
  uint32_t count;
  Piece pieces[kCapacity];
};

struct DeviceTable {
  uint32_t count;
  const Piece* pieces;
};

constexpr int kBatch = 4;  // loads in flight per thread

template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T) < 16 ? kWidth * sizeof(T) : 16) Vector {
  T values[kWidth];
};

template <typename Src, typename Dst>
using Accumulate = std::conditional_t<std::is_same_v<Src, double> || std::is_same_v<Dst, double>, double, float>;

template <typename Src, typename Dst, bool kScaled>
__device__ Dst convert(Src value, double scale) {
  if constexpr (std::is_same_v<Src, Dst> && !kScaled) {
    return value;  // the bits, also of a NaN
  } else {
    using Acc = Accumulate<Src, Dst>;
    return static_cast<Dst>(static_cast<Acc>(value) * static_cast<Acc>(scale));
  }
}

// Copies `count` vectors of kWidth elements.
template <typename Src, typename Dst, bool kScaled, int kWidth>
__device__ void copy_vectors(const Src* src, Dst* dst, int count, double scale) {
  const auto* in = reinterpret_cast<const Vector<Src, kWidth>*>(src);
  auto* out = reinterpret_cast<Vector<Dst, kWidth>*>(dst);
  for (int first = static_cast<int>(threadIdx.x); first < count; first += kBatch * kThreads) {
    Vector<Src, kWidth> loaded[kBatch] = {};  // zeros stand for a src that does not exist
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (src != nullptr && first + b * kThreads < count) loaded[b] = in[first + b * kThreads];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * kThreads < count) {
        Vector<Dst, kWidth> result;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) result.values[i] = convert<Src, Dst, kScaled>(loaded[b].values[i], scale);
        out[first + b * kThreads] = result;
      }
    }
  }
}

template <typename T, int kWidth>
__device__ bool is_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(Vector<T, kWidth>) == 0;
}

// One chunk: vectors as wide as both ends allow, 16 bytes at most, then what is left, one by one. Gradients lie in a
// bucket without gaps, so one of odd length leaves those after it at 8 or 4 bytes. A chunk begins a multiple of 16
// bytes into its piece, so all chunks of a piece are aligned alike. The narrower type fills a vector; the wider one
// makes several accesses of 16 bytes.
template <typename Src, typename Dst, bool kScaled,
    int kWidth = 16 / (sizeof(Src) < sizeof(Dst) ? sizeof(Src) : sizeof(Dst))>
__device__ void copy_chunk(const Src* src, Dst* dst, int count, double scale) {
  if constexpr (kWidth > 1) {
    if (!is_aligned<Src, kWidth>(src) || !is_aligned<Dst, kWidth>(dst))
      return copy_chunk<Src, Dst, kScaled, kWidth / 2>(src, dst, count, scale);
  }
  const int vectors = count / kWidth;
  copy_vectors<Src, Dst, kScaled, kWidth>(src, dst, vectors, scale);
  const int done = vectors * kWidth;
  copy_vectors<Src, Dst, kScaled, 1>(src == nullptr ? nullptr : src + done, dst + done, count - done, scale);
}

// The last piece whose first chunk is not after `chunk`.
__device__ inline uint32_t find_piece(const Piece* pieces, uint32_t count, uint32_t chunk) {
  uint32_t low = 0, high = count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (pieces[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

template <typename Src, typename Dst, bool kScaled, typename Table>
__global__ void scaled_copy_kernel(const __grid_constant__ Table table, double scale) {
  const uint32_t chunk = table.pieces[0].first_chunk + blockIdx.x;
  const Piece& piece = table.pieces[find_piece(table.pieces, table.count, chunk)];
  const int64_t begin = static_cast<int64_t>(chunk - piece.first_chunk) * kChunk;
  const int64_t left = piece.numel - begin;
  const Src* src = piece.src == nullptr ? nullptr : static_cast<const Src*>(piece.src) + begin;
  Dst* dst = static_cast<Dst*>(piece.dst) + begin;
  const int count = static_cast<int>(left < kChunk ? left : kChunk);
  copy_chunk<Src, Dst, kScaled>(src, dst, count, scale);
}

// --- the choice of types ------------------------------------------------------------------------------

template <typename T>
struct Type {
  using type = T;
};

template <typename Visitor>
bool visit_floating(at::ScalarType type, Visitor&& visitor) {
  switch (type) {
    case at::ScalarType::Half: return visitor(Type<c10::Half>()), true;
    case at::ScalarType::BFloat16: return visitor(Type<c10::BFloat16>()), true;
    case at::ScalarType::Float: return visitor(Type<float>()), true;
    case at::ScalarType::Double: return visitor(Type<double>()), true;
    default: return false;
  }
}

template <typename Visitor>
bool visit_bits(size_t size, Visitor&& visitor) {
  switch (size) {
    case 1: return visitor(Type<uint8_t>()), true;
    case 2: return visitor(Type<uint16_t>()), true;
    case 4: return visitor(Type<uint32_t>()), true;
    case 8: return visitor(Type<uint64_t>()), true;
    default: return false;
  }
}

// Calls visitor(Src, Dst, scaled) with Type<>s and a std::bool_constant. REQUIRES: real types.
template <typename Visitor>
void visit_types(at::ScalarType src_type, at::ScalarType dst_type, double scale, Visitor&& visitor) {
  const bool same = src_type == dst_type;
  bool known = visit_floating(src_type, [&](auto src) {
    if (same && scale == 1.0) {
      visitor(src, src, std::false_type());
    } else {
      const bool cast = visit_floating(dst_type, [&](auto dst) { visitor(src, dst, std::true_type()); });
      TORCH_CHECK(cast, "scaled_copy cannot cast ", src_type, " to ", dst_type);
    }
  });
  if (!known && same && scale == 1.0)
    known = visit_bits(c10::elementSize(src_type), [&](auto bits) { visitor(bits, bits, std::false_type()); });
  TORCH_CHECK(known, "scaled_copy cannot scale ", src_type, " by ", scale, " into ", dst_type);
}

// Calls launch(Src, Dst, scaled, table), once, or never when there is nothing to do.
template <typename Launch>
void dispatch(const std::vector<CopySegment>& segments, at::ScalarType src_type, at::ScalarType dst_type,
    double scale, Launch&& launch) {
  const bool complex = c10::isComplexType(src_type);
  TORCH_CHECK(complex == c10::isComplexType(dst_type), "scaled_copy cannot cast ", src_type, " to ", dst_type);
  const bool copies_bits = src_type == dst_type && scale == 1.0;
  const SegmentTable table = make_segment_table(segments, complex ? 2 : 1, copies_bits);
  TORCH_CHECK(table.chunks <= std::numeric_limits<int>::max(), "scaled_copy: more elements than one launch takes");
  const auto real = [&](at::ScalarType type) { return complex ? c10::toRealValueType(type) : type; };
  if (!table.pieces.empty()) {
    visit_types(real(src_type), real(dst_type), scale,
        [&](auto src, auto dst, auto scaled) { launch(src, dst, scaled, table); });
  }
}

}  // namespace cuda
}  // namespace minddp
