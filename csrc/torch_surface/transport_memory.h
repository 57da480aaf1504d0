// Case: buckets of a device in memory that the process group registers with all ranks, where the program asks for it.
//
// It asks as torch's class lets it, by DDP_DISABLE_COMM_MEM=0. NCCL's registration takes a while; then it reduces
// such memory in place by NVLS where the machine has that.
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

// Warns once if the program asks in vain.
class TransportMemory : public Case {
 public:
  std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>& indices, Bucket::Options& options) override {
    const at::Device device = state().parameters[indices[0]].device();
    if (device.is_cpu() || !asks_for_device_memory()) return nullptr;
    const auto backend = backend_for(*state().group, device.type());
    if (backend == nullptr || !backend->supportsTensorAlloc(device.index())) {
      const std::string why = backend == nullptr ? "the group has no backend of torch's for"
                                                 : "its backend " + backend->getBackendName() + " has none on";
      TORCH_WARN_ONCE("DDP_DISABLE_COMM_MEM=0 asks for buckets in the process group's own memory, and ", why, " ",
          device, ": they are allocated as usual.");
      return nullptr;
    }
    options.allocate = [backend](int64_t numel, const at::TensorOptions& tensor) {
      return backend->allocateTensor(numel, tensor);
    };
    return nullptr;
  }
};

}  // namespace minddp
