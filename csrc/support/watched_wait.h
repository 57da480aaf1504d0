// A wait with somebody who looks at it while it goes on, and may end it: another rank may be lost.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>

namespace minddp {

// From one look at a wait that goes on to the next. A second, but in tests, where time runs faster.
inline std::atomic<double> look_seconds{1.0};

// Called at each look with the seconds so far and "", and at a failed end with the error's text. Ends
// the wait by raising, and must not block: the wait ends when the future does.
using OnStall = std::function<void(double seconds, const std::string& error)>;

// Returns once the collective of `future` has ended, as wait.h's Wait. REQUIRES: the GIL is not held.
inline void wait_watching(c10::ivalue::Future& future, const OnStall& on_stall) {
  double seconds = 0;
  if (!future.completed()) {
    auto ended = std::make_shared<std::promise<void>>();
    std::future<void> end = ended->get_future();
    future.addCallback([ended](c10::ivalue::Future&) { ended->set_value(); }, /*uses_future=*/false);
    while (end.wait_for(std::chrono::duration<double>(look_seconds)) != std::future_status::ready)
      on_stall(seconds += look_seconds, "");
  }
  if (future.hasError()) on_stall(seconds, future.tryRetrieveErrorMessage());
  future.waitAndThrow();
}

}  // namespace minddp
