// The sum over the two ranks of a Gloo group, in one message each way.
//
// Gloo's all-reduce takes two rounds: each rank sums one half, then sends that back. Where the message is small the
// rounds are what costs, since the bytes are as many in one: here each rank sends all it has, and both add. The bits
// are the same, for a + b = b + a.
#pragma once

#include "reducer/wait.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace minddp {

// Whether a group may have such sums at all.
bool is_gloo_pair(c10d::ProcessGroup& group);

// Whether `tensor` is summed in this way: by what is the same on both ranks alone, since both must do it.
bool takes_pair_sum(const at::Tensor& tensor);

// Sums `tensor` over both ranks, in place, before the future completes. REQUIRES: takes_pair_sum(tensor); the other
// rank calls this too.
Flight pair_sum(c10d::ProcessGroup& group, const at::Tensor& tensor);

}  // namespace minddp
