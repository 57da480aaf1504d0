#include "support/sum_of_squares.h"

#include "half_precision.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace minddp {
namespace {

constexpr int64_t kTogether = 256;

// Sixteen sums at once, each in an order that does not depend on the instruction set.
template <class T>
MINDDP_INLINE double squares_of_block(const T* values, int64_t n) {
  constexpr int64_t kLanes = 16;
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane] * values[i + lane];
  double sum = 0;
  for (T lane : lanes) sum += double(lane);
  for (; i < n; ++i) sum += double(values[i]) * double(values[i]);
  return sum;
}

template <class T>
MINDDP_INLINE double squares(const T* values, int64_t n) {
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kTogether)
    sum += squares_of_block(values + begin, std::min(kTogether, n - begin));
  return sum;
}

// Of float16 or bfloat16.
template <class T>
MINDDP_INLINE double squares_widened(const T* values, int64_t n) {
  double sum = 0;
  float block[kTogether];
  for (int64_t begin = 0; begin < n; begin += kTogether) {
    const int64_t size = std::min(kTogether, n - begin);
    widen<false>(values + begin, block, size);
    sum += squares_of_block(block, size);
  }
  return sum;
}

MINDDP_VECTORIZED double of_float(const float* values, int64_t n) { return squares(values, n); }
MINDDP_VECTORIZED double of_double(const double* values, int64_t n) { return squares(values, n); }
MINDDP_VECTORIZED double of_bfloat16(const c10::BFloat16* values, int64_t n) { return squares_widened(values, n); }
double of_half(const c10::Half* values, int64_t n) { return squares_widened(values, n); }

}  // namespace

bool can_square(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return tensor.layout() == at::kStrided && tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense() &&
      !tensor.key_set().has(c10::DispatchKey::Python) && !tensor._is_zerotensor() &&
      (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf);
}

double sum_of_squares(const at::Tensor& tensor) {
  const void* values = tensor.const_data_ptr();
  const int64_t n = tensor.numel();
  switch (tensor.scalar_type()) {
    case at::kFloat: return of_float(static_cast<const float*>(values), n);
    case at::kDouble: return of_double(static_cast<const double*>(values), n);
    case at::kBFloat16: return of_bfloat16(static_cast<const c10::BFloat16*>(values), n);
    case at::kHalf: return of_half(static_cast<const c10::Half*>(values), n);
    default: TORCH_INTERNAL_ASSERT(false, "sum_of_squares");
  }
}

}  // namespace minddp
