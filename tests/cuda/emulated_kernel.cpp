// Runs the CUDA kernels of csrc on a CPU: every block, and every thread or warp in it, in turn.
//
// The copy's threads share nothing and never wait for each other, the other kernels' warps neither. So any order is a
// legal one, and index arithmetic, alignment, conversions and the choice of types can be tested without a GPU.
#include <algorithm>
#include <cstdint>
#include <string>

#define __global__
#define __device__
#define __grid_constant__

struct Index {
  uint32_t x;
};
static Index blockIdx, threadIdx;

#include "wire/cuda/block_quantization_kernel.cuh"
#include "copy/cuda/coverage.h"
#include "copy/cuda/scaled_copy_kernel.cuh"

namespace {

using namespace minddp;
using namespace minddp::cuda;

std::string last_error;

// All lanes of a warp, one after the other.
struct AllLanes {
  float x[kLanes][kMine];

  void each(auto&& f) {
    for (int lane = 0; lane < kLanes; ++lane) f(lane, x[lane]);
  }
  uint32_t largest(auto&& f) const {
    uint32_t found = 0;
    for (const float* mine : x) found = std::max(found, f(mine));
    return found;
  }
};

// work(warp, block) for each of `count` blocks, from the last to the first.
void for_each_block(int64_t count, auto&& work) {
  for (int64_t block = count - 1; block >= 0; --block) {
    AllLanes warp;
    work(warp, block);
  }
}

// One launch over pieces [begin, end), as the launcher makes it from a table or a part of one.
template <typename Src, typename Dst, bool kScaled>
void launch(const SegmentTable& table, size_t begin, size_t end, double scale) {
  const DeviceTable part{static_cast<uint32_t>(end - begin), table.pieces.data() + begin};
  const int64_t last = end == table.pieces.size() ? table.chunks : table.pieces[end].first_chunk;
  const int64_t blocks = last - table.pieces[begin].first_chunk;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < kThreads; ++threadIdx.x)
      scaled_copy_kernel<Src, Dst, kScaled>(part, scale);
}

}  // namespace

// `capacity`: pieces to a launch. Returns the number of launches, or -1 and sets the error.
extern "C" int emulate(const CopySegment* segments, int64_t count, int src_type, int dst_type, double scale,
    int64_t capacity) {
  try {
    int launches = 0;
    dispatch(std::vector<CopySegment>(segments, segments + count), static_cast<at::ScalarType>(src_type),
        static_cast<at::ScalarType>(dst_type), scale,
        [&](auto src, auto dst, auto scaled, const SegmentTable& table) {
          const size_t pieces = table.pieces.size();
          for (size_t begin = 0; begin < pieces; begin += capacity, ++launches) {
            launch<typename decltype(src)::type, typename decltype(dst)::type, decltype(scaled)::value>(
                table, begin, std::min<size_t>(begin + capacity, pieces), scale);
          }
        });
    return launches;
  } catch (const c10::Error& error) {
    last_error = error.what_without_backtrace();
    return -1;
  }
}

extern "C" int64_t emulate_largest_table(int driver, int capability_major) {
  return int64_t(largest_table(driver, capability_major));
}

// The functions of block_quantization.h.
extern "C" void emulate_quantize(
    const void* src, int type, int64_t numel, double scale, QuantizedBlock* lost, QuantizedBlock* blocks) {
  visit_floating(static_cast<at::ScalarType>(type), [&](auto of) {
    const auto* numbers = static_cast<const typename decltype(of)::type*>(src);
    for_each_block(QuantizedBlock::count(numel), [&](auto& warp, int64_t block) {
      const int64_t begin = block * QuantizedBlock::kNumbers;
      quantize_block(
          warp, numbers + begin, numel - begin, float(scale), lost ? lost + block : nullptr, blocks + block);
    });
  });
}

extern "C" void emulate_dequantize(const QuantizedBlock* blocks, double scale, void* dst, int type, int64_t numel) {
  visit_floating(static_cast<at::ScalarType>(type), [&](auto of) {
    auto* numbers = static_cast<typename decltype(of)::type*>(dst);
    for_each_block(QuantizedBlock::count(numel), [&](auto& warp, int64_t block) {
      const int64_t begin = block * QuantizedBlock::kNumbers;
      dequantize_block(warp, blocks + block, float(scale), numbers + begin, numel - begin);
    });
  });
}

extern "C" void emulate_add_quantized(QuantizedBlock* pieces, int count, int64_t blocks, QuantizedBlock* lost) {
  for_each_block(blocks, [&](auto& warp, int64_t block) {
    add_blocks(warp, pieces + block, count, blocks, lost ? lost + block : nullptr);
  });
}

extern "C" const char* error() { return last_error.c_str(); }

// Asks `calls` times whether a device is covered that is (`covered`), or is not. Returns how often the device was
// asked and the log warned: 100 * asked + warned, and 10,000 more where an answer was not `covered`.
extern "C" int ask_coverage(int covered, int calls) {
  struct Counting : c10::WarningHandler {
    void process(const c10::Warning& warning) override { ++warned, last_error = warning.msg(); }
    int warned = 0;
  } counting;
  c10::WarningUtils::WarningHandlerGuard guard(&counting);
  Coverage coverage;
  int asked = 0, wrong = 0;
  for (int call = 0; call < calls; ++call)
    wrong += coverage.covers(1, [&](c10::DeviceIndex) {
      ++asked;
      return Coverage::Answer{covered != 0, "7.0"};
    }) != (covered != 0);
  return 10'000 * (wrong != 0) + 100 * asked + counting.warned;
}
