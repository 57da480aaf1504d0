// Case: a gradient that is alone in its bucket, on the CPU. It swaps memory with the buffer, which saves the copy
// back.
#pragma once

#include "reducer/bucket.h"
#include "support/exchange_memory.h"
#include "support/scale_in_place.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace minddp {

class LoneBucket : public Bucket {
 public:
  using Bucket::Bucket;
  // The flight is dropped first: it holds the buffer's memory, too. A buffer that a hook may hold is copied.
  void unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) override {
    c10::NoGradGuard no_grad;
    const bool is_ours = std::exchange(flight_, {}).frees_buffer;
    if (!is_ours || !used[slots_->front().index] || !exchange(result, scale)) Bucket::unpack(result, scale, used);
  }

 private:
  // False, and nothing has changed, where a copy is needed.
  bool exchange(const at::Tensor& result, double scale) {
    Slot& slot = slots_->front();
    at::Tensor& grad = slot.grad();
    if (!grad.defined() || grad.requires_grad() || grad.scalar_type() != grad_dtype_ || !result.is_same(buffer_) ||
        !is_one_piece(slot, grad))
      return false;
    // Two tensors hold the buffer's memory: itself and the slot's view.
    if (!exchange_memory(grad, buffer_, 2)) return false;
    slot.view = view_of(buffer_, slot);
    scale_in_place(grad, scale);
    return true;
  }
};

}  // namespace minddp
