// Python's view of the cases of torch's surface.
#include "bindings.h"
#include "context_gradients.h"
#include "gradient_views.h"
#include "lazy_memory.h"
#include "reducer/reducer.h"
#include "shared_parameters.h"
#include "sparse_bucket.h"
#include "transport_memory.h"

namespace minddp {
namespace {

// Mixed precision: parameters and gradients change their dtype within an iteration.
class AnyGradDtype : public Case {
 public:
  std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>&, Bucket::Options& options) override {
    options.any_grad_dtype = true;
    return nullptr;
  }
};

// A backward runs that goes to given inputs, and keeps its graph for another one.
bool backward_looks_ahead() {
  return current_graph_task() != -1 && !GraphTaskNodes().reaches_all_leaves() &&
      torch::autograd::get_current_graph_task_keep_graph();
}

const Companion torch_surface("torch_surface", [](py::module_& module) {
  bind_case<AnyGradDtype>(module, "AnyGradDtype").def(py::init());
  bind_case<ContextGradients>(module, "ContextGradients").def(py::init<std::string>(), py::arg("refusal"));
  bind_case<GradientViews>(module, "GradientViews")
      .def(py::init())
      .def("adopt_gradients", &GradientViews::adopt_gradients);
  bind_case<LazyMemory>(module, "LazyMemory").def(py::init());
  bind_case<SharedParameters>(module, "SharedParameters")
      .def(py::init())
      .def(
          "add",
          [](SharedParameters& shared, const std::shared_ptr<Reducer>& other, bool views) {
            shared.add(other, views);
          },
          given("other"), py::arg("views"));
  bind_case<SparseBuckets>(module, "SparseBuckets").def(py::init<std::vector<bool>>(), py::arg("expect_sparse"));
  bind_case<TransportMemory>(module, "TransportMemory").def(py::init());
  module.def("backward_looks_ahead", &backward_looks_ahead);
});

}  // namespace
}  // namespace minddp
