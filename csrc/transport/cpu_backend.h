#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace minddp {

// Null where the group has none: one for other devices, or one written in Python.
inline c10::intrusive_ptr<c10d::Backend> cpu_backend(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::DeviceType::CPU);
  } catch (const c10::Error&) {
    return nullptr;
  }
}

}  // namespace minddp
