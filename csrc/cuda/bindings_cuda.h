// Python's way to the CUDA units; called by ../bindings.cpp when built with MINDDP_WITH_CUDA.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace minddp {

void bind_cuda(pybind11::module_& module);

}  // namespace minddp
