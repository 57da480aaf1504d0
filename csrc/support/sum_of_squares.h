// The squared 2-norm of a piece of memory: one read of it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace minddp {

// On the CPU, of floating numbers. Squared in float, or double for double; sums of 256 are added up in double.
bool can_square(c10::ScalarType dtype);
double sum_of_squares(const void* values, int64_t numel, c10::ScalarType dtype);  // REQUIRES: can_square(dtype)

}  // namespace minddp
