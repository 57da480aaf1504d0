#include "grouped_copy.h"

#include "scale_in_place.h"

#include <ATen/ATen.h>

namespace minddp {
namespace {

// Its device given, so that nobody asks the driver for it.
at::Tensor flat(const void* memory, int64_t numel, at::Device device, at::ScalarType dtype) {
  return at::for_blob(const_cast<void*>(memory), {numel})
      .options(at::dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

// What lies one after another in memory, as the gradients of a bucket do, is one tensor.
std::vector<at::Tensor> joined(const std::vector<CopySegment>& segments, at::Device device, at::ScalarType dtype) {
  std::vector<at::Tensor> runs;
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const char* end = nullptr;
  int64_t numel = 0;
  for (const CopySegment& s : segments) {
    if (end != s.dst) {
      if (numel > 0) runs.push_back(flat(end - numel * size, numel, device, dtype));
      numel = 0;
    }
    numel += s.numel;
    end = static_cast<const char*>(s.dst) + s.numel * size;
  }
  if (numel > 0) runs.push_back(flat(end - numel * size, numel, device, dtype));
  return runs;
}

}  // namespace

// Scaled in the wider of the two types, as scaled_copy is: rounded once. Where neither is (float16 and bfloat16), one
// by one.
void grouped_copy(const std::vector<CopySegment>& segments, at::Device device, at::ScalarType src, at::ScalarType dst,
    double scale) {
  const at::ScalarType wider = c10::promoteTypes(src, dst);
  const bool widens = wider == dst, one_by_one = wider != dst && wider != src;
  std::vector<CopySegment> written;
  std::vector<at::Tensor> sources, destinations, zeros;
  for (const CopySegment& s : segments) {
    if (s.numel == 0) continue;  // and has no memory
    if (s.src == nullptr) {
      zeros.push_back(flat(s.dst, s.numel, device, dst));
      continue;
    }
    if (one_by_one) {
      scaled_copy_reference(s, device, src, dst, scale);
      continue;
    }
    written.push_back(s);
    if (s.src == s.dst && widens) continue;
    sources.push_back(flat(s.src, s.numel, device, src));
    destinations.push_back(flat(s.dst, s.numel, device, dst));
  }
  if (!zeros.empty()) at::_foreach_zero_(zeros);
  if (scale != 1.0 && !widens && !sources.empty()) sources = at::_foreach_mul(sources, scale);
  if (!sources.empty()) at::_foreach_copy_(destinations, sources);
  if (scale == 1.0 || !widens || written.empty()) return;
  std::vector<at::Tensor> runs = joined(written, device, dst);
  runs.size() == 1 ? scale_in_place(runs[0], scale) : at::_foreach_mul_(runs, scale);
}

}  // namespace minddp
