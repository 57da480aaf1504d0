// Python's view of the shared-memory transport; no logic. minddp/shm/__init__.py is the face.
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <pybind11/chrono.h>

#include "shm_backend.h"

namespace py = pybind11;

PYBIND11_MODULE(_shm, module) {
  using namespace minddp::shm;
  module.doc() = "minddp's shared-memory transport. Private: use minddp.shm.";
  py::class_<Segment, std::shared_ptr<Segment>>(module, "Segment")
      .def(py::init(&Group::make_segment))
      .def("card",
          [](const Segment& own) {
            const Card card = Group::card_of(own);
            return std::make_tuple(card.pid, card.descriptor, card.token);
          })
      .def("close", &Segment::close);
  module.def(
      "backend",
      [](const ShmBackend::Rest& rest, const std::shared_ptr<Segment>& own,
          const std::vector<std::tuple<int, int, uint64_t>>& cards,
          std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
        std::vector<Card> all;
        for (const auto& [pid, descriptor, token] : cards) all.push_back({pid, descriptor, token});
        return c10::make_intrusive<ShmBackend>(rest, own, all, timeout);
      },
      py::arg("rest").none(false), py::arg("own").none(false), py::arg("cards"), py::arg("timeout"),
      py::call_guard<py::gil_scoped_release>());
}
