// Python's view of the guards' cases.
#include "bindings.h"
#include "changed_module.h"
#include "earlier_sums.h"
#include "grad_states.h"
#include "moments.h"

namespace minddp {
namespace {

const Companion guards("guards", [](py::module_& module) {
  bind_case<ChangedModule>(module, "ChangedModule")
      .def(py::init())
      .def("note", &ChangedModule::note, py::arg("parameters"), py::arg("why"));
  bind_case<EarlierSums>(module, "EarlierSums").def(py::init());
  bind_case<GradStates>(module, "GradStates")
      .def(py::init<std::function<void()>>(), py::arg("on_graph"))
      .def("is_interrupted", &GradStates::is_interrupted)
      .def("bypassed", &GradStates::bypassed)
      .def("suspects", &GradStates::suspects)
      .def("touched_in", &GradStates::touched_in, py::arg("index"))
      .def("averaged_since", &GradStates::averaged_since, py::arg("index"), py::arg("backward"));
  bind_case<Moments>(module, "Moments").def(py::init()).def("last", &Moments::last);
});

}  // namespace
}  // namespace minddp
