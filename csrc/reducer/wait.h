// A collective that is under way, and how to wait for it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

namespace minddp {

using Future = c10::ivalue::Future;

// A collective that is under way. `work`: set if the reducer started it; on a device also if a hook let the
// reducer start it. It holds the inputs.
struct Flight {
  c10::intrusive_ptr<Future> future;
  c10::intrusive_ptr<c10d::Work> work;
};

// Makes a device's current streams wait for a collective whose future is complete; on a device, that may mean that it
// is enqueued. NCCL's future knows its devices, and orders their streams. Its Work lets go of the inputs when it is
// synchronized; its wait() would block the host under TORCH_NCCL_BLOCKING_WAIT. The future of a group in Python may
// know no device: then wait() orders streams.
inline void order_streams(c10d::Work& work) {
  const auto future = work.getFuture();
  if (future->devices().empty()) return void(work.wait());
  future->wait();
  work.synchronize();
}

// Returns once the collective of a future has ended; raises what that raises, or what it finds about lost peers.
using Wait = std::function<void(Future&)>;

}  // namespace minddp
