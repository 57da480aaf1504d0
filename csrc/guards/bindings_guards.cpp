// Python's view of the guards' cases.
#include "bindings.h"
#include "grad_states.h"
#include "moments.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <thread>

namespace minddp {
namespace {

// On a thread that never takes the GIL: it may go on while the interpreter ends. Nobody waits for it.
void abort(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  std::thread([group = std::move(group)] {
    try {
      group->abort();
    } catch (const std::exception&) {  // nobody is there to hear it
    }
  }).detach();
}

const Companion guards("guards", [](py::module_& module) {
  bind_case<GradStates>(module, "GradStates")
      .def(py::init<std::function<void()>>(), py::arg("on_graph"))
      .def("is_interrupted", &GradStates::is_interrupted)
      .def("bypassed", &GradStates::bypassed)
      .def("suspects", &GradStates::suspects)
      .def("touched_in", &GradStates::touched_in, py::arg("index"))
      .def("averaged_since", &GradStates::averaged_since, py::arg("index"), py::arg("backward"));
  module.def("abort", &abort, py::arg("group").none(false),
      "Gives up what is under way in a process group. Returns at once.");
  bind_case<Moments>(module, "Moments").def(py::init()).def("last", &Moments::last).def("counts", &Moments::counts);
});

}  // namespace
}  // namespace minddp
