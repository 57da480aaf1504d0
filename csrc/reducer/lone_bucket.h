// A gradient that is alone in its bucket, on the CPU. It swaps memory with the buffer, which saves the copy
// back.
#pragma once

#include "bucket.h"
#include "copy/scale_in_place.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace minddp {

// Two tensors of equal size swap their memory: a copy that costs nothing. CPU only: elsewhere streams order who uses
// which memory.
// False, and nothing has changed, where somebody else holds `tensor` or its memory (which an array of the program's
// may, unless torch has allocated it), where more than `holders` hold that of `flat`, or where one covers only a part
// of its storage. `flat` is one-dimensional and as long as `tensor`, whose elements lie one after another.
inline bool exchange_memory(at::Tensor& tensor, at::Tensor& flat, size_t holders) {
  auto is_whole = [](const at::Tensor& t, size_t holders) {
    return t.storage_offset() == 0 && t.storage().nbytes() == size_t(t.numel() * t.element_size()) &&
        t.storage().use_count() == holders && t.storage().allocator() != nullptr;
  };
  if (tensor.use_count() != 1 || !is_whole(tensor, 1) || !is_whole(flat, holders)) return false;
  at::Storage memory = tensor.storage();
  tensor.set_(flat.storage(), 0, tensor.sizes(), tensor.strides());
  flat.set_(std::move(memory), 0, {flat.numel()}, {1});
  return true;
}

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
