// Python's view of what gradients travel as, and of sums in the order of ranks.
#include "bindings.h"
#include "block_quantization.h"
#include "gil_release.h"
#include "half_bucket.h"
#include "ordered_allreduce.h"
#include "quantized_bucket.h"

namespace minddp {
namespace {

using Ordered = std::shared_ptr<OrderedAllreduce>;

// The group's all-reduce is replaced by an ordered one, which all wrappers of the group share.
class OrderedSums : public Case {
 public:
  explicit OrderedSums(Ordered ordered) : ordered_(std::move(ordered)) {}
  std::optional<Flight> all_reduce(Bucket& bucket, const at::Tensor& buffer, const Wait&) override {
    if (buffer.is_sparse()) return {};
    auto* quantized = dynamic_cast<QuantizedBucket*>(&bucket);
    PieceSum sum = quantized ? quantized->sum_of_pieces() : sum_of_elements(bucket.dtype());
    return Flight{ordered_->start(buffer, std::move(sum)), nullptr, /*frees_buffer=*/true};
  }

 private:
  const Ordered ordered_;
};

Ordered on_host(HostOrderedAllreduce::Backend scatters, HostOrderedAllreduce::Backend gathers, int64_t chunk_bytes) {
  auto* made = new HostOrderedAllreduce(std::move(scatters), std::move(gathers), chunk_bytes);
  return Ordered(made, [](OrderedAllreduce* ended) {
    const GilRelease release;  // it joins its backends' threads
    delete ended;
  });
}

Ordered on_device(c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t chunk_bytes) {
  return std::make_shared<DeviceOrderedAllreduce>(std::move(group), chunk_bytes);
}

// For tests: blocks of codes, on the tensors' device.
void bind_block_quantization(py::module_& module) {
  using Lost = std::optional<at::Tensor>;
  module.def(
      "quantize",
      [](const at::Tensor& src, double scale, const Lost& lost, const at::Tensor& blocks) {
        quantize(src, scale, lost.value_or(at::Tensor()), Rounding(), blocks);
      },
      Release(), py::arg("src"), py::arg("scale"), py::arg("lost"), py::arg("blocks"));
  module.def("dequantize", &dequantize, Release(), py::arg("blocks"), py::arg("scale"), py::arg("dst"));
  module.def(
      "add_quantized",
      [](const std::vector<at::Tensor>& pieces, const Lost& lost) {
        add_quantized(pieces, Rounding(), lost.value_or(at::Tensor()));
      },
      Release(), py::arg("pieces"), py::arg("lost"));
}

const Companion wire("wire", [](py::module_& module) {
  py::class_<OrderedAllreduce, Ordered>(
      module, "OrderedAllreduce", "Sums in the order of ranks; see csrc/wire/ordered_allreduce.h.")
      .def_static("on_host", &on_host, py::arg("scatters"), py::arg("gathers"), py::arg("chunk_bytes"))
      .def_static("on_device", &on_device, py::arg("group"), py::arg("chunk_bytes"));
  bind_case<OrderedSums>(module, "OrderedSums").def(py::init<Ordered>(), py::arg("ordered"));
  bind_case<HalfBuckets>(module, "HalfBuckets").def(py::init());
  bind_case<QuantizedBuckets>(module, "QuantizedBuckets")
      .def(py::init([](std::vector<std::optional<at::Tensor>> residuals, bool stochastic, uint64_t seed) {
        return std::make_shared<QuantizedBuckets>(Quantization{std::move(residuals), stochastic, seed});
      }),
          py::arg("residuals"), py::arg("stochastic"), py::arg("seed"));
  bind_block_quantization(module);
});

}  // namespace
}  // namespace minddp
