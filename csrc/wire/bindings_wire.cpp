// Python's view of what gradients travel as, and of sums in the order of ranks.
#include "bindings.h"
#include "block_quantization.h"
#include "copy/gil_release.h"
#include "copy/in_memory.h"
#include "half_bucket.h"
#include "ordered_allreduce.h"
#include "quantized_bucket.h"

#include <pybind11/chrono.h>

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

// Blocks, or error feedback, for so many numbers. An undefined tensor is fine where none is needed.
void check_blocks(const at::Tensor& blocks, int64_t numel) {
  if (!blocks.defined()) return;
  const int64_t nbytes = QuantizedBlock::count(numel) * int64_t(sizeof(QuantizedBlock));
  TORCH_CHECK_VALUE(lies_in_memory(blocks) && blocks.scalar_type() == at::kByte && blocks.is_contiguous() &&
          blocks.numel() == nbytes,
      "blocks for ", numel, " numbers are ", nbytes, " contiguous bytes");
}

void check_numbers(const at::Tensor& numbers) {
  TORCH_CHECK_VALUE(lies_in_memory(numbers) && numbers.is_non_overlapping_and_dense(), "a dense tensor is needed");
}

// For tests: blocks of codes, on the tensors' device.
void bind_block_quantization(py::module_& module) {
  using Lost = std::optional<at::Tensor>;
  module.def(
      "quantize",
      [](const at::Tensor& src, double scale, const Lost& lost, const at::Tensor& blocks) {
        check_numbers(src);
        check_blocks(blocks, src.numel());
        check_blocks(lost.value_or(at::Tensor()), src.numel());
        quantize(src, scale, lost.value_or(at::Tensor()), blocks);
      },
      Release(), py::arg("src"), py::arg("scale"), py::arg("lost"), py::arg("blocks"));
  module.def(
      "dequantize",
      [](const at::Tensor& blocks, double scale, const at::Tensor& dst) {
        check_numbers(dst);
        check_blocks(blocks, dst.numel());
        dequantize(blocks, scale, dst);
      },
      Release(), py::arg("blocks"), py::arg("scale"), py::arg("dst"));
  module.def(
      "add_quantized",
      [](const std::vector<at::Tensor>& pieces, const Lost& lost) {
        TORCH_CHECK_VALUE(!pieces.empty(), "pieces: at least one");
        const int64_t blocks = pieces[0].numel() / int64_t(sizeof(QuantizedBlock));
        for (const at::Tensor& piece : pieces) check_blocks(piece, blocks * QuantizedBlock::kNumbers);
        check_blocks(lost.value_or(at::Tensor()), blocks * QuantizedBlock::kNumbers);
        add_quantized(pieces, lost.value_or(at::Tensor()));
      },
      Release(), py::arg("pieces"), py::arg("lost"));
}

// Of the group's backend for CPU tensors: torch's Python interface has only Gloo's.
std::chrono::milliseconds cpu_timeout(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group->getBackend(c10::DeviceType::CPU)->getBackendOptions()->timeout;
}

const Companion wire("wire", [](py::module_& module) {
  py::class_<OrderedAllreduce, Ordered>(
      module, "OrderedAllreduce", "Sums in the order of ranks; see csrc/wire/ordered_allreduce.h.")
      .def_static("on_host", &on_host, given("scatters"), given("gathers"), py::arg("chunk_bytes"))
      .def_static("on_device", &on_device, given("group"), py::arg("chunk_bytes"));
  bind_case<OrderedSums>(module, "OrderedSums").def(py::init<Ordered>(), given("ordered"));
  bind_case<HalfBuckets>(module, "HalfBuckets").def(py::init());
  bind_case<QuantizedBuckets>(module, "QuantizedBuckets").def(py::init<Residuals>(), py::arg("residuals"));
  bind_block_quantization(module);
  module.def("cpu_timeout", &cpu_timeout, given("group"));
});

}  // namespace
}  // namespace minddp
