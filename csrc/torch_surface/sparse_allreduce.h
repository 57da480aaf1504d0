// The sum of sparse tensors over ranks, by two all-gathers: every rank gets the others' entries and adds them up.
//
// Backends have no usable all-reduce of their own for this. NCCL has none. Gloo (torch 2.13) assigns each finished
// operation's name to a string that its two threads share without a lock; "_ALLREDUCE_SPARSE" is too long for the
// string's own space, so a sparse all-reduce beside any other collective frees memory that is in use: heap
// corruption, within seconds when provoked.
#pragma once

#include "reducer/wait.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace minddp {

// In place, and over before it returns: `tensor` becomes the coalesced sum over the
// group's ranks. COO layout, any real dtype. REQUIRES: the same shape and dtype on all ranks.
c10::intrusive_ptr<Future> sparse_allreduce(c10d::ProcessGroup& group, const at::Tensor& tensor, const Wait& wait);

}  // namespace minddp
