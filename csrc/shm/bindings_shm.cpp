// Python's view of the shared-memory transport; no logic. minddp/shm/__init__.py is the face.
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <pybind11/chrono.h>

#include "shm_backend.h"

namespace py = pybind11;

namespace minddp {
namespace {

using shm::ShmBackend;

ShmBackend& as_shm(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* shm = dynamic_cast<ShmBackend*>(backend.get());
  TORCH_CHECK_VALUE(
      shm != nullptr, "this process group does not use the 'shm' backend, but '", backend->getBackendName(), "'");
  return *shm;
}

}  // namespace
}  // namespace minddp

PYBIND11_MODULE(_shm, module) {
  using namespace minddp;
  module.doc() = "minddp's shared-memory transport. Private: use minddp.shm.";
  module.def(
      "backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
          std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<ShmBackend>(store, rank, size, timeout);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "empty",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, int64_t numel, at::ScalarType dtype) {
        return as_shm(backend).allocateTensor(numel, at::TensorOptions().dtype(dtype));
      },
      py::arg("backend"), py::arg("numel"), py::arg("dtype"));
  module.def(
      "is_shared",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, const at::Tensor& tensor) {
        return as_shm(backend).is_shared(tensor);
      },
      py::arg("backend"), py::arg("tensor"));
}
