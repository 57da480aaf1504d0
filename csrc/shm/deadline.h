// Until when an operation may wait, and how long that was. Pure: any thread.
#pragma once

#include <algorithm>
#include <chrono>

namespace minddp::shm {

struct Deadline {
  explicit Deadline(std::chrono::milliseconds timeout)
      : timeout(timeout), at(std::chrono::steady_clock::now() + timeout) {}

  std::chrono::milliseconds left() const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(at - std::chrono::steady_clock::now());
    return std::max(left, std::chrono::milliseconds(0));
  }

  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point at;
};

}  // namespace minddp::shm
