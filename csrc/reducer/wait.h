// Waiting for collectives, and collectives that nobody has to wait for.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

namespace minddp {

using Future = c10::ivalue::Future;

// A collective that is under way. `work` is there where the reducer made it, and on a device also where a hook had
// the reducer make it. It holds the inputs, and its wait() orders the current stream after the collective, where the
// future alone does not. (Its synchronize() is nothing where the process group is written in Python.)
struct Flight {
  c10::intrusive_ptr<Future> future;
  c10::intrusive_ptr<c10d::Work> work;
};

// Returns once the collective of a future has ended; raises what that raises, or what it finds about lost peers.
using Wait = std::function<void(Future&)>;

}  // namespace minddp
