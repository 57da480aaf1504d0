// A collective that is under way, and how to wait for it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

namespace minddp {

using Future = c10::ivalue::Future;

// A collective that is under way. `work`: set if the reducer started it; on a device also if a hook let the
// reducer start it. It holds the inputs, and makes the current stream wait for the collective, which the future alone
// does not.
struct Flight {
  c10::intrusive_ptr<Future> future;
  c10::intrusive_ptr<c10d::Work> work;
};

// Returns once the collective of a future has ended; raises what that raises, or what it finds about lost peers.
using Wait = std::function<void(Future&)>;

}  // namespace minddp
