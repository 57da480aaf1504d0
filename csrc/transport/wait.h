// Waiting for collectives.
#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>

namespace minddp {

using Future = c10::ivalue::Future;

// Returns once the collective of a future has ended; raises what that raises, or what it finds about lost peers.
using Wait = std::function<void(Future&)>;

// A Wait that calls `on_stall` with the seconds so far, each second without an end and at a failed end: a peer that
// will never come, or has closed its connection, can be asked for its reasons. REQUIRES: the GIL is not held.
inline void wait_watching(Future& future, const std::function<void(double seconds)>& on_stall) {
  int seconds = 0;
  if (!future.completed()) {
    auto ended = std::make_shared<std::promise<void>>();
    std::future<void> end = ended->get_future();
    future.addCallback([ended](Future&) { ended->set_value(); }, /*uses_future=*/false);
    while (end.wait_for(std::chrono::seconds(1)) != std::future_status::ready) on_stall(++seconds);
  }
  if (future.hasError()) on_stall(seconds);
  future.waitAndThrow();
}

}  // namespace minddp
