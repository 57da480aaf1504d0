// Gradients that are the result of an earlier reduction, where that is a sum: they must not be summed again.
//
// A mean of equal numbers is that number, so a mean may be taken of whole gradients, with earlier means in them. A
// sum would count the earlier one once a rank: whoever has not called zero_grad() is refused. Threads: the reducer's.
#pragma once

#include "same_tensor.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace minddp {

class EarlierSums {
 public:
  explicit EarlierSums(size_t count) : results_(count) {}
  // `.grad` of a parameter is a reduction's result now.
  void note(size_t index, const at::Tensor& grad) { results_[index] = grad; }
  // Whether `.grad` still holds one: neither replaced nor zeroed. To be asked before it grows; costs a pass over
  // memory for a gradient that was zeroed in place.
  bool holds(size_t index, const at::Tensor& grad) {
    if (!(results_[index] == grad)) return false;
    const at::Tensor values = grad.is_sparse() ? grad.coalesce().values() : grad;
    if (values.any().item<bool>()) return true;
    results_[index] = SameTensor();
    return false;
  }
  void take_over(size_t index, const EarlierSums& before, size_t there) { results_[index] = before.results_[there]; }

 private:
  std::vector<SameTensor> results_;  // by parameter
};

}  // namespace minddp
