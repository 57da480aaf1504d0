// Two tensors of equal size swap their memory: a copy that costs nothing.
//
// CPU only: elsewhere streams order who uses which memory.
#pragma once

#include <ATen/ATen.h>

namespace minddp {

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

}  // namespace minddp
