#include "bindings_cuda.h"

#include <optional>
#include <vector>

#include "scaled_copy.h"

namespace minddp {
namespace {

void check_dense(const at::Tensor& tensor, const at::Tensor& like, const char* name, size_t index) {
  TORCH_CHECK(
      tensor.is_cuda() && tensor.device() == like.device() && tensor.scalar_type() == like.scalar_type(),
      name, "[", index, "] is on another device or of another dtype than ", name, "[0]");
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), name, "[", index, "] is not dense");
}

// For tests and benchmarks: pairs of tensors with equal numbers of elements; None as a source is zeros.
void cuda_scaled_copy(
    const std::vector<std::optional<at::Tensor>>& sources,
    const std::vector<at::Tensor>& destinations,
    at::ScalarType src_type,
    double scale,
    const std::optional<at::Tensor>& nonfinite) {
  TORCH_CHECK(sources.size() == destinations.size(), "as many sources as destinations are needed");
  if (destinations.empty()) {
    return;
  }
  std::vector<CopySegment> segments;
  for (size_t i = 0; i < sources.size(); ++i) {
    const at::Tensor& dst = destinations[i];
    check_dense(dst, destinations[0], "destinations", i);
    const void* src = nullptr;
    if (sources[i]) {
      TORCH_CHECK(
          sources[i]->is_cuda() && sources[i]->device() == dst.device() &&
              sources[i]->scalar_type() == src_type && sources[i]->numel() == dst.numel() &&
              sources[i]->is_non_overlapping_and_dense(),
          "sources[", i, "] does not match its destination");
      src = sources[i]->const_data_ptr();
    }
    segments.push_back({src, dst.mutable_data_ptr(), dst.numel()});
  }
  uint32_t* flags = nullptr;
  if (nonfinite) {
    TORCH_CHECK(
        nonfinite->device() == destinations[0].device() && nonfinite->scalar_type() == at::kInt &&
            nonfinite->is_contiguous() && nonfinite->numel() == static_cast<int64_t>(segments.size()),
        "nonfinite must be int32, one word per pair, on the pairs' device");
    flags = static_cast<uint32_t*>(nonfinite->mutable_data_ptr());
  }
  cuda::scaled_copy(
      segments, src_type, destinations[0].scalar_type(), scale, destinations[0].device().index(), flags);
}

}  // namespace

void bind_cuda(pybind11::module_& module) {
  module.def(
      "cuda_scaled_copy", &cuda_scaled_copy, pybind11::arg("sources"), pybind11::arg("destinations"),
      pybind11::arg("src_type"), pybind11::arg("scale") = 1.0, pybind11::arg("nonfinite") = std::nullopt,
      pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace minddp
