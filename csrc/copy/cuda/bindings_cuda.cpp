// Python's way to the CUDA units; ../bindings.cpp calls it when built with MINDDP_WITH_CUDA.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "scaled_copy.h"

namespace py = pybind11;

namespace minddp {
namespace {

void check(const at::Tensor& tensor, at::Device device, at::ScalarType type, int64_t numel, size_t index) {
  TORCH_CHECK(tensor.is_cuda() && tensor.device() == device && tensor.scalar_type() == type &&
          tensor.numel() == numel && tensor.is_non_overlapping_and_dense(),
      "pair ", index, ": expected dense ", type, " on ", device, " with ", numel, " elements, found ",
      tensor.toString(), " ", tensor.sizes(), " on ", tensor.device());
}

// For tests and benchmarks: pairs of tensors with equal numbers of elements; None as a source is zeros.
void scaled_copy_tensors(const std::vector<std::optional<at::Tensor>>& sources,
    const std::vector<at::Tensor>& destinations, at::ScalarType src_type, double scale,
    const std::optional<at::Tensor>& nonfinite) {
  TORCH_CHECK(!destinations.empty() && sources.size() == destinations.size(), "as many sources as destinations");
  const at::Device device = destinations[0].device();
  const at::ScalarType dst_type = destinations[0].scalar_type();
  std::vector<CopySegment> segments;
  segments.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    const int64_t numel = destinations[i].numel();
    check(destinations[i], device, dst_type, numel, i);
    if (sources[i]) check(*sources[i], device, src_type, numel, i);
    segments.push_back(
        {sources[i] ? sources[i]->const_data_ptr() : nullptr, destinations[i].mutable_data_ptr(), numel});
  }
  uint32_t* flags = nullptr;
  if (nonfinite) {
    check(*nonfinite, device, at::kInt, static_cast<int64_t>(segments.size()), 0);
    flags = static_cast<uint32_t*>(nonfinite->mutable_data_ptr());
  }
  cuda::scaled_copy(segments, src_type, dst_type, scale, device.index(), flags);
}

}  // namespace

void bind_cuda(py::module_& module) {
  module.def("cuda_scaled_copy", &scaled_copy_tensors, py::arg("sources"), py::arg("destinations"),
      py::arg("src_type"), py::arg("scale") = 1.0, py::arg("nonfinite") = std::nullopt,
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace minddp
