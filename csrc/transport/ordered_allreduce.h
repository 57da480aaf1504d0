// An all-reduce of our own: each element is summed in the order of ranks, whatever it is made of and whichever bucket
// it is in.
//
//   all-to-all     every rank gets the others' copies of one piece, which is its own to sum
//   sum            in the order of ranks, as PieceSum says: float32 sums of bfloat16, of blocks of codes
//   all-to-all     every rank gets all pieces' sums, so that all have the same bits
//
// That sends as many bytes as a ring all-reduce, and the wire's dtype need not be one that can be summed. A buffer
// goes in chunks: one is summed while the next is on its way.
//
// What always holds. The first all-to-alls are issued by the thread that calls start(), the second by a thread of
// this object, each in the order of the buffers and their chunks. So each of the two has a backend (c10d::Backend) of
// its own, whose collectives have the same order on all ranks, as the reducer's own have. Memory: a buffer under way
// takes its size once more. Threads: any may call start(). None of them takes the GIL.
#pragma once

#include "piece_sum.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

namespace minddp {

class OrderedAllreduce {
 public:
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  // Two backends of the same ranks, for CPU tensors. `chunk_bytes`: about so many travel at a time.
  OrderedAllreduce(Backend scatters, Backend gathers, int64_t chunk_bytes);
  // A collective that does not end is left to itself, with what it needs.
  ~OrderedAllreduce();
  OrderedAllreduce(const OrderedAllreduce&) = delete;
  OrderedAllreduce& operator=(const OrderedAllreduce&) = delete;

  // In place; the future holds the buffer. REQUIRES: one piece of CPU memory, as long as on the other ranks.
  c10::intrusive_ptr<c10::ivalue::Future> start(const at::Tensor& buffer, PieceSum sum);

 private:
  struct Worker;
  const std::shared_ptr<Worker> worker_;  // shared with its thread
};

}  // namespace minddp
