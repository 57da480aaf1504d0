// Asked before a pointer to a tensor's numbers is taken: do they lie in memory, where its sizes and strides say?
//
// Torch has tensors without memory (meta, zero tensors, those of its modes), and tensors that are read otherwise than
// their memory (conjugate and negative views). A program has classes of its own, and may shrink a tensor's storage.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

namespace minddp {

// Bytes from the storage's begin to the tensor's last element.
inline size_t bytes_needed(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
}

inline size_t bytes_there(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return 0;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  return storage->_mutable_data_ptr_no_checks().get() != nullptr ? storage->nbytes() : 0;  // any other way may raise
}

// All of the tensor's elements have memory. One without elements needs none.
inline bool has_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && (tensor.numel() == 0 || bytes_needed(tensor) <= bytes_there(tensor));
}

// What is there are the tensor's numbers.
inline bool lies_in_memory(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOtherwise({c10::DispatchKey::Python, c10::DispatchKey::Conjugate,
      c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor, c10::DispatchKey::NestedTensor});
  return !tensor.key_set().has_any(kOtherwise) && has_memory(tensor);
}

// Torch's operators can read it. They would read a shrunk storage beyond its end.
inline bool is_readable(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python) || tensor._is_zerotensor() || has_memory(tensor);
}

}  // namespace minddp
