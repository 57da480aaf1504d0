// Python's view of the reductions' cases.
#include "bindings.h"
#include "earlier_sums.h"

namespace minddp {
namespace {

const Companion reductions(
    "reductions", [](py::module_& module) { bind_case<EarlierSums>(module, "EarlierSums").def(py::init()); });

}  // namespace
}  // namespace minddp
