#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "coverage.h"
#include "scaled_copy.h"
#include "scaled_copy_kernel.cuh"

namespace minddp {
namespace cuda {
namespace {

// Older toolkits compile no larger one.
constexpr size_t kLargestTable = CUDART_VERSION >= kLargeTablesFrom ? kLargeTable : kSmallTable;
static_assert(sizeof(InlineTable<kSmallTable>) + sizeof(double) <= 4096);
static_assert(sizeof(InlineTable<kLargeTable>) + sizeof(double) <= 32764);

// By the driver, which may be older than the toolkit that this was built with.
size_t most_in_parameters(c10::DeviceIndex device) {
  static const int driver = [] {
    int version = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&version));
    return version;
  }();
  int major = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return std::min(kLargestTable, largest_table(driver, major));
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Launches the kernel of one pair of types over a table, in one of three ways of handing it over.
template <typename Src, typename Dst, bool kScaled>
struct Launcher {
  double scale;
  c10::cuda::CUDAStream stream;
  size_t most;  // pieces that fit into the parameters

  void operator()(const SegmentTable& table) const {
    const size_t count = table.pieces.size();
    if (count <= kSmallTable)
      in_parameters<kSmallTable>(table, 0, count);
    else if (count <= most)
      in_parameters<kLargestTable>(table, 0, count);
    else if (is_capturing(stream))
      in_batches(table);
    else
      in_memory(table);
  }

  template <typename Table>
  void launch(const Table& table, int64_t blocks) const {
    scaled_copy_kernel<Src, Dst, kScaled, Table>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream.stream()>>>(table, scale);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <int kCapacity>
  void in_parameters(const SegmentTable& table, size_t begin, size_t end) const {
    InlineTable<kCapacity> parameters;
    parameters.count = static_cast<uint32_t>(end - begin);
    std::copy(table.pieces.begin() + begin, table.pieces.begin() + end, parameters.pieces);
    const int64_t last = end == table.pieces.size() ? table.chunks : table.pieces[end].first_chunk;
    launch(parameters, last - table.pieces[begin].first_chunk);
  }

  // A graph replays an upload from the host's memory as it is then, which nobody could tell how long
  // to keep; parameters are part of the graph. Its launches cost little when they are replayed.
  void in_batches(const SegmentTable& table) const {
    const size_t count = table.pieces.size();
    for (size_t begin = 0; begin < count; begin += most) {
      const size_t end = std::min(begin + most, count);
      most == kSmallTable ? in_parameters<kSmallTable>(table, begin, end)
                          : in_parameters<kLargestTable>(table, begin, end);
    }
  }

  // Too many for the parameters: one upload, one launch. Both buffers may be let go at once: torch's
  // allocators give pinned memory to nobody before the copies recorded on it have ended, and device
  // memory only to later work on the same stream.
  void in_memory(const SegmentTable& table) const {
    const auto nbytes = static_cast<int64_t>(table.pieces.size() * sizeof(Piece));
    const auto options = at::TensorOptions().dtype(at::kByte);
    at::Tensor host = at::empty({nbytes}, options.pinned_memory(true));
    std::memcpy(host.mutable_data_ptr(), table.pieces.data(), nbytes);
    at::Tensor device = at::empty({nbytes}, options.device(stream.device()));
    device.copy_(host, /*non_blocking=*/true);
    launch(
        DeviceTable{static_cast<uint32_t>(table.pieces.size()), static_cast<const Piece*>(device.const_data_ptr())},
        table.chunks);
  }
};

// By the driver, which knows what was compiled, and whether it can compile the build's PTX for this device.
Coverage::Answer ask_driver(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  int major = 0, minor = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, scaled_copy_kernel<float, float, true, InlineTable<kSmallTable>>);
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
      static_cast<void>(cudaGetLastError());
      break;  // else the next check finds it
    default: C10_CUDA_CHECK(error);
  }
  return {error == cudaSuccess, std::to_string(major) + "." + std::to_string(minor)};
}

}  // namespace

bool covers(c10::DeviceIndex device) {
  static Coverage coverage;
  return coverage.covers(device, ask_driver);
}

void scaled_copy(const std::vector<CopySegment>& segments, at::ScalarType src_type, at::ScalarType dst_type,
    double scale, c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  dispatch(segments, src_type, dst_type, scale, [&](auto src, auto dst, auto scaled, const SegmentTable& table) {
    using Launch = Launcher<typename decltype(src)::type, typename decltype(dst)::type, decltype(scaled)::value>;
    Launch{scale, c10::cuda::getCurrentCUDAStream(device), most_in_parameters(device)}(table);
  });
}

}  // namespace cuda
}  // namespace minddp
