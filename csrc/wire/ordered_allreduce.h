// An all-reduce of our own: each element is summed in the order of ranks, whatever it is made of and whichever bucket
// it is in.
//
//   all-to-all     every rank gets the others' copies of one piece, which is its own to sum
//   sum            in the order of ranks, as PieceSum says: float32 sums of bfloat16, of blocks of codes
//   all-to-all     every rank gets all pieces' sums, so that all have the same bits; on a device an all-gather
//
// That sends as many bytes as a ring all-reduce, and the wire's dtype need not be one that can be summed. A buffer
// goes in chunks: one is summed while the next is on its way. A buffer under way takes its memory once more. Threads:
// any may call start(). None takes the GIL.
//
// On the CPU (HostOrderedAllreduce) one thread of the object issues the first all-to-alls, another one the second,
// each in the order of the buffers and their chunks. So each of the two has a backend of its own, whose collectives
// have the same order on all ranks.
//
// On a device (DeviceOrderedAllreduce) start() enqueues all of it, on a stream of the object's own. All collectives
// have one order then, and are the process group's. NCCL's all-to-all is grouped sends and receives. Its all-gather
// needs no copies of the sum, and has NVLS.
#pragma once

#include "piece_sum.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <mutex>
#include <unordered_map>

namespace minddp {

class OrderedAllreduce {
 public:
  virtual ~OrderedAllreduce() = default;
  // In place; the future holds the buffer. REQUIRES: one piece of memory, as long as on the other ranks.
  virtual c10::intrusive_ptr<c10::ivalue::Future> start(const at::Tensor& buffer, PieceSum sum) = 0;
};

class HostOrderedAllreduce : public OrderedAllreduce {
 public:
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  // Two backends of the same ranks, for CPU tensors. `chunk_bytes`: about so many travel at a time.
  HostOrderedAllreduce(Backend scatters, Backend gathers, int64_t chunk_bytes);
  // A collective that does not end is left to itself, with what it needs.
  ~HostOrderedAllreduce() override;
  HostOrderedAllreduce(const HostOrderedAllreduce&) = delete;
  HostOrderedAllreduce& operator=(const HostOrderedAllreduce&) = delete;

  c10::intrusive_ptr<c10::ivalue::Future> start(const at::Tensor& buffer, PieceSum sum) override;

 private:
  struct Worker;
  const std::shared_ptr<Worker> worker_;  // shared with its thread
};

class DeviceOrderedAllreduce : public OrderedAllreduce {
 public:
  DeviceOrderedAllreduce(c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t chunk_bytes)
      : group_(std::move(group)), chunk_bytes_(chunk_bytes) {}
  c10::intrusive_ptr<c10::ivalue::Future> start(const at::Tensor& buffer, PieceSum sum) override;

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const int64_t chunk_bytes_;
  std::mutex mutex_;                                      // guards streams_, and the order of collectives
  std::unordered_map<c10::Device, c10::Stream> streams_;  // where sums run
};

}  // namespace minddp
