// The all-reduce of whatever a bucket holds.
#pragma once

#include "reducer/wait.h"
#include "sparse_allreduce.h"
#include "support/completed.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace minddp {

// All-reduces `tensor` in place: its sum over ranks. Complex numbers, which some backends lack, travel as pairs; the
// reduction of a sparse tensor is over before this returns, by `wait`.
inline Flight allreduce(c10d::ProcessGroup& group, const at::Tensor& tensor, const Wait& wait) {
  if (tensor.is_sparse()) return {sparse_allreduce(group, tensor, wait), nullptr};
  std::vector<at::Tensor> tensors = {tensor.is_complex() ? at::view_as_real(tensor) : tensor};
  auto work = group.allreduce(tensors);
  return {work->getFuture(), work, /*frees_buffer=*/true};
}

}  // namespace minddp
