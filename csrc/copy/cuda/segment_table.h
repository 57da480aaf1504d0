// How one kernel launch is shared out over segments of very different sizes. Pure; host only.
//
// Every segment is cut into chunks of kChunk elements and every chunk is one thread block's work, so
// that a launch over one embedding of a gigabyte and 300 biases keeps all multiprocessors busy to
// the end. A block finds its segment by binary search over `first_chunk`: log2(segments) steps over
// a table that fits into a cache, where a block-to-segment map would have to be uploaded each time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/scaled_copy.h"

namespace minddp {
namespace cuda {

constexpr int kThreads = 256;              // a block
constexpr int64_t kChunk = 16 * kThreads;  // elements of a block's work; a multiple of any vector width

// Pieces that fit into a kernel's parameters. Those may take 4,096 bytes; 32,764 where toolkit and driver are of CUDA
// 12.1 or newer, on devices of compute capability 7.0 or more. Two capacities, because the driver copies all of the
// parameters at each launch and most buckets need the small one.
constexpr size_t kSmallTable = 126, kLargeTable = 1022;
constexpr int kLargeTablesFrom = 12010;  // CUDA 12.1, as it numbers its versions

inline size_t largest_table(int driver, int capability_major) {
  return driver >= kLargeTablesFrom && capability_major >= 7 ? kLargeTable : kSmallTable;
}

struct Piece {
  const void* src;
  void* dst;
  int64_t numel;
  uint32_t first_chunk;  // chunks in all pieces before this one
};
static_assert(sizeof(Piece) == 32, "the capacity of a launch is computed from this");

struct SegmentTable {
  std::vector<Piece> pieces;  // none of them empty
  int64_t chunks = 0;
};

// `values_per_element` is 2 for complex numbers, which are copied as pairs of real ones.
// `skip_in_place` leaves out segments whose src is their dst: where nothing would change.
inline SegmentTable make_segment_table(
    const std::vector<CopySegment>& segments, int values_per_element, bool skip_in_place) {
  SegmentTable table;
  table.pieces.reserve(segments.size());
  for (const CopySegment& segment : segments) {
    const int64_t numel = segment.numel * values_per_element;
    if (numel > 0 && !(skip_in_place && segment.src == segment.dst)) {
      table.pieces.push_back({segment.src, segment.dst, numel, static_cast<uint32_t>(table.chunks)});
      table.chunks += (numel + kChunk - 1) / kChunk;
    }
  }
  return table;
}

}  // namespace cuda
}  // namespace minddp
