// How a companion binds its cases, without the core's knowing it: each has a static Companion in a file of its own,
// csrc/<companion>/bindings_<companion>.cpp. An extension of its own calls bind_case in its PYBIND11_MODULE instead.
#pragma once

#include "reducer/events.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace minddp {

// An argument that must be there. Of a plain py::arg, None makes a null pointer in the place of what Python holds by
// a pointer.
inline py::arg given(const char* name) { return py::arg(name).none(false); }

using Release = py::call_guard<py::gil_scoped_release>;

// Before anything is imported, each is noted; import of `_C` calls `bind` with a new module `_C.<name>`.
struct Companion {
  using Bind = void (*)(py::module_&);
  Companion(const char* name, Bind bind) { all().emplace_back(name, bind); }
  static std::vector<std::pair<const char*, Bind>>& all() {
    static std::vector<std::pair<const char*, Bind>> companions;
    return companions;
  }
};

// A class of cases, which Reducer.add() takes.
template <class Kind>
py::class_<Kind, Case, std::shared_ptr<Kind>> bind_case(py::module_& module, const char* name) {
  return py::class_<Kind, Case, std::shared_ptr<Kind>>(module, name);
}

inline std::vector<size_t> parameter_indices(const Bucket& bucket) {
  std::vector<size_t> indices;
  for (const Bucket::Slot& slot : *bucket.slots()) indices.push_back(slot.index);
  return indices;
}

}  // namespace minddp
