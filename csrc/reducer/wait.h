// A collective that is under way, and how to wait for it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
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

// The future of a collective that is over. It holds a list of one tensor, as a process group's future does.
inline c10::intrusive_ptr<Future> completed(const at::Tensor& tensor) {
  std::vector<c10::Device> devices;
  if (!tensor.device().is_cpu()) devices.push_back(tensor.device());
  auto future = c10::make_intrusive<Future>(c10::ListType::ofTensors(), std::move(devices));
  future->markCompleted(c10::List<at::Tensor>({tensor}));
  return future;
}

// Sums `tensor` over ranks, in place. Complex numbers, which some backends lack, travel as pairs.
inline Flight all_reduce(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {tensor.is_complex() ? at::view_as_real(tensor) : tensor};
  auto work = group.allreduce(tensors);
  return {work->getFuture(), work, /*frees_buffer=*/true};
}

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

// The time between two calls of OnStall. A second, except in tests, where time runs faster.
inline std::atomic<double> look_seconds{1.0};

// Called while a wait goes on, with the seconds so far and ""; and when the collective has failed, with the error's
// text. It may end the wait by raising, and must not block: the wait ends when the future does.
using OnStall = std::function<void(double seconds, const std::string& error)>;

// A Wait that somebody watches. REQUIRES: the GIL is not held.
inline void wait_watching(Future& future, const OnStall& on_stall) {
  double seconds = 0;
  if (!future.completed()) {
    auto ended = std::make_shared<std::promise<void>>();
    std::future<void> end = ended->get_future();
    future.addCallback([ended](Future&) { ended->set_value(); }, /*uses_future=*/false);
    while (end.wait_for(std::chrono::duration<double>(look_seconds)) != std::future_status::ready)
      on_stall(seconds += look_seconds, "");
  }
  if (future.hasError()) on_stall(seconds, future.tryRetrieveErrorMessage());
  future.waitAndThrow();
}

}  // namespace minddp
