// The all-reduce of whatever a bucket holds.
#pragma once

#include "reducer/wait.h"
#include "pair_sum.h"
#include "sparse_allreduce.h"
#include "support/completed.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace minddp {

// Whom a sum is over: this rank alone; it and one more, and both know that the other calls allreduce() too; any,
// where some may call the process group's own instead.
enum class Among { kThisRank, kAgreedPair, kGroup };

// All-reduces `tensor` in place: its sum over ranks. Complex numbers, which some backends lack, travel as pairs; the
// reduction of a sparse tensor is over before this returns, by `wait`.
inline Flight allreduce(c10d::ProcessGroup& group, const at::Tensor& tensor, Among among, const Wait& wait) {
  if (among == Among::kThisRank) return {completed(tensor), nullptr};  // its own sum
  if (tensor.is_sparse()) return {sparse_allreduce(group, tensor, wait), nullptr};
  if (among == Among::kAgreedPair && takes_pair_sum(tensor)) return pair_sum(group, tensor);
  std::vector<at::Tensor> tensors = {tensor.is_complex() ? at::view_as_real(tensor) : tensor};
  auto work = group.allreduce(tensors);
  return {work->getFuture(), work};
}

}  // namespace minddp
