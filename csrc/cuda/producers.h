// The streams that made a bucket's gradients, and waiting for them without the host.
//
// autograd runs a parameter's AccumulateGrad on the stream of its forward. A bucket is packed on the stream
// of its last gradient, so that stream must first wait for the others. Any device with streams; on the CPU
// there is nothing to order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <vector>

namespace minddp {

class Producers {
 public:
  explicit Producers(at::Device device) : device_(device) {}

  void clear() { streams_.clear(); }
  // The current stream has made a gradient.
  void note() {
    if (device_.is_cpu()) return;
    c10::Stream now = current();
    if (std::find(streams_.begin(), streams_.end(), now) == streams_.end()) streams_.push_back(now);
  }
  // What the current stream does from here on comes after all noted gradients.
  void wait() const {
    for (const c10::Stream& stream : streams_) {
      if (stream == current()) continue;
      c10::Event event(device_.type());
      event.record(stream);
      event.block(current());
    }
  }
  // `tensor`, made on one of the noted streams, is about to be freed while the current stream may still use it.
  void keep(at::Tensor& tensor) const {
    auto other = [&](const c10::Stream& stream) { return stream != current(); };
    if (tensor.defined() && !tensor.is_sparse() && std::any_of(streams_.begin(), streams_.end(), other))
      tensor.record_stream(current());
  }

 private:
  c10::Stream current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

  at::Device device_;
  std::vector<c10::Stream> streams_;
};

}  // namespace minddp
