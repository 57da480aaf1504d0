// Waiting for collectives, and collectives that nobody has to wait for.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace minddp {

using Future = c10::ivalue::Future;

// A collective that is under way. `work` is there where the reducer made it, and on a device also where a hook had
// the reducer make it. It holds the inputs, and orders the current stream after the collective, where the future
// alone does not.
struct Flight {
  c10::intrusive_ptr<Future> future;
  c10::intrusive_ptr<c10d::Work> work;
};

// Returns once the collective of a future has ended; raises what that raises, or what it finds about lost peers.
using Wait = std::function<void(Future&)>;

// Told the seconds so far, each second without an end, and at a failed end with its error's text, else empty. Ends
// the wait by raising, and must not block: the wait ends when the future does.
using OnStall = std::function<void(double seconds, const std::string& error)>;

// A Wait that calls `on_stall`, which may know more about lost peers. REQUIRES: the GIL is not held.
inline void wait_watching(Future& future, const OnStall& on_stall) {
  int seconds = 0;
  if (!future.completed()) {
    auto ended = std::make_shared<std::promise<void>>();
    std::future<void> end = ended->get_future();
    future.addCallback([ended](Future&) { ended->set_value(); }, /*uses_future=*/false);
    while (end.wait_for(std::chrono::seconds(1)) != std::future_status::ready) on_stall(++seconds, "");
  }
  if (future.hasError()) on_stall(seconds, future.tryRetrieveErrorMessage());
  future.waitAndThrow();
}

}  // namespace minddp
