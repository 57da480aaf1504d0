// Case: memory for buckets that the group's transport reaches without a copy, where it has such.
//
// On a device the program asks for it as torch's class lets it, by DDP_DISABLE_COMM_MEM=0: NCCL registers it with
// all ranks, which takes a while, and reduces it in place by NVLS where the machine has that.
#pragma once

#include "reducer/events.h"

#include <cstdlib>
#include <string>
#include <string_view>

namespace minddp {

// Null where the group has none: one for other devices, or one written in Python.
inline c10::intrusive_ptr<c10d::Backend> backend_for(c10d::ProcessGroup& group, c10::DeviceType type) {
  try {
    return group.getBackend(type);
  } catch (const c10::Error&) {
    return nullptr;
  }
}

// As torch's class reads it: set, and not "1".
inline bool asks_for_device_memory() {
  const char* disabled = std::getenv("DDP_DISABLE_COMM_MEM");
  return disabled != nullptr && std::string_view(disabled) != "1";
}

inline void warn_of_no_device_memory(const std::string& why, at::Device device) {
  TORCH_WARN_ONCE("DDP_DISABLE_COMM_MEM=0 asks for buckets in the process group's own memory, and ", why, " ", device,
      ": they are allocated as usual.");
}

// Warns once if the program asks for device memory in vain.
class TransportMemory : public Case {
 public:
  std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>& indices, Bucket::Options& options) override {
    const at::Device device = state().parameters[indices[0]].device();
    const bool on_host = device.is_cpu();
    if (!on_host && !asks_for_device_memory()) return nullptr;
    auto backend = backend_for(*state().group, device.type());
    if (backend == nullptr || !backend->supportsTensorAlloc(on_host ? 0 : device.index())) {
      const std::string why = backend == nullptr ? "the group has no backend of torch's for"
                                                 : "its backend " + backend->getBackendName() + " has none on";
      if (!on_host) warn_of_no_device_memory(why, device);
      return nullptr;
    }
    options.allocate = [backend](int64_t numel, const at::TensorOptions& tensor) {
      return backend->allocateTensor(numel, tensor);
    };
    return nullptr;
  }
};

}  // namespace minddp
