// The streams of a bucket's life, and their order without the host.
//
// autograd runs a parameter's AccumulateGrad on the stream of its forward. A bucket is packed on the stream of its
// last gradient, launched from that of the gradient which completed the buckets before it, and unpacked on the stream
// that called backward(). Each waits for the one before; at the end the streams of the gradients wait for the result,
// since they are the next to touch `.grad` and the buffer. Any device with streams; on the CPU there is nothing to
// order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace minddp {

// `tensor` is about to be freed, or handed over, while the current stream may still use it. Nobody knows on which
// stream it was allocated; if it is this one, the allocator does nothing.
inline void record_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return;
  const c10::Stream current = c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
  if (!tensor.is_sparse()) return tensor.record_stream(current);
  tensor._indices().record_stream(current);
  tensor._values().record_stream(current);
}

class Producers {
 public:
  explicit Producers(at::Device device) : device_(device) {}

  void clear() {
    streams_.clear();
    packed_on_.reset();
  }
  // The current stream has made a gradient.
  void note() {
    if (device_.is_cpu()) return;
    c10::Stream now = current();
    if (std::find(streams_.begin(), streams_.end(), now) == streams_.end()) streams_.push_back(now);
  }
  // What the current stream does from here on comes after all noted gradients.
  void wait() const {
    for (const c10::Stream& stream : streams_) order(stream, current());
  }
  // The current stream has packed the bucket.
  void note_packed() {
    if (!device_.is_cpu()) packed_on_ = current();
  }
  // What the current stream does from here on comes after the packing.
  void wait_packed() const {
    if (packed_on_) order(*packed_on_, current());
  }
  // What made the gradients goes on after what the current stream was given so far. So does what packs them next: it
  // waits for them.
  void hold_back() const {
    for (const c10::Stream& stream : streams_) order(current(), stream);
  }

 private:
  c10::Stream current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }
  void order(const c10::Stream& before, const c10::Stream& after) const {
    if (before == after) return;
    c10::Event event(device_.type());
    event.record(before);
    event.block(after);
  }

  at::Device device_;
  std::vector<c10::Stream> streams_;
  std::optional<c10::Stream> packed_on_;
};

}  // namespace minddp
