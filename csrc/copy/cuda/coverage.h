// Which devices this build's kernels run on.
//
// A binary holds code for the architectures that it was compiled for. On any other GPU a launch fails, in the first
// backward; so each device is asked about once, before that. One that is not covered is served without the kernels,
// and the log says so. Any thread may call it.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <string>
#include <vector>

namespace minddp {
namespace cuda {

class Coverage {
 public:
  struct Answer {
    bool covered;
    std::string capability;  // of the device: "7.0"
  };
  // Whether `device` is covered; `ask(device)` gives the Answer at the first call for it.
  bool covers(c10::DeviceIndex device, const auto& ask) {
    const std::lock_guard lock(mutex_);
    if (device >= static_cast<int64_t>(states_.size())) states_.resize(device + 1, State::kUnknown);
    if (states_[device] == State::kUnknown) {
      const Answer answer = ask(device);
      states_[device] = answer.covered ? State::kCovered : State::kNotCovered;
      if (!answer.covered) warn(device, answer.capability);
    }
    return states_[device] == State::kCovered;
  }

 private:
  enum class State { kUnknown, kCovered, kNotCovered };
  static void warn(c10::DeviceIndex device, const std::string& capability) {
    TORCH_WARN("minddp was built without code for cuda:", static_cast<int>(device), ", of capability ", capability,
        " (minddp.__config__() says for which it was). Gradients there are copied by torch's operators, which is "
        "slower. Build it with TORCH_CUDA_ARCH_LIST=",
        capability);
  }

  std::mutex mutex_;
  std::vector<State> states_;  // by device
};

}  // namespace cuda
}  // namespace minddp
