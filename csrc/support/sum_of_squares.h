// The squared 2-norm of a tensor: one read of its memory. Pure.
#pragma once

#include <ATen/core/Tensor.h>

namespace minddp {

// On the CPU, real floating point, in one piece of memory that is there, and no subclass.
bool can_square(const at::Tensor& tensor);
// Squared in float, or double for double; sums of 256 are added up in double. REQUIRES: can_square(tensor).
double sum_of_squares(const at::Tensor& tensor);

}  // namespace minddp
