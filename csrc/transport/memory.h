// Memory for buckets that the group's CPU transport reaches without a copy, where it has such.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>

namespace minddp {

using Allocate = std::function<at::Tensor(int64_t numel, const at::TensorOptions& options)>;

// Null where the group has none: one for other devices, or one written in Python.
inline c10::intrusive_ptr<c10d::Backend> cpu_backend(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::DeviceType::CPU);
  } catch (const c10::Error&) {
    return nullptr;
  }
}

// Empty where the transport has no memory of its own.
inline Allocate transport_memory(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Device device) {
  if (!device.is_cpu()) return nullptr;
  auto backend = cpu_backend(*group);
  if (backend == nullptr || !backend->supportsTensorAlloc(0)) return nullptr;
  return
      [backend](int64_t numel, const at::TensorOptions& options) { return backend->allocateTensor(numel, options); };
}

}  // namespace minddp
