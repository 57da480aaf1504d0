// A collective that is under way, and how to wait for it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

namespace minddp {

using Future = c10::ivalue::Future;

// `work`: the process group's, which keeps the inputs alive. With a communication hook it is null, except on a device
// if the hook calls Reducer::all_reduce(). `frees_buffer`: nobody but this flight holds the buffer.
struct Flight {
  c10::intrusive_ptr<Future> future;
  c10::intrusive_ptr<c10d::Work> work;
  bool frees_buffer = false;
};

// Makes a device's current streams wait for a collective whose future is complete. On a device, a complete future may
// only mean that the collective is enqueued. NCCL's future knows its devices, and orders their streams.
// work.synchronize() makes NCCL release the inputs. work.wait() would do so, too, but blocks the host under
// TORCH_NCCL_BLOCKING_WAIT. The future of a process group that is written in Python may know no device: then
// work.wait() orders the streams.
inline void order_streams(c10d::Work& work) {
  const auto future = work.getFuture();
  if (future->devices().empty()) return void(work.wait());
  future->wait();
  work.synchronize();
}

// Waits until the future is complete. Raises the collective's error, or an error about a lost rank.
using Wait = std::function<void(Future&)>;

}  // namespace minddp
