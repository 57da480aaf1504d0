// Whether a tensor is the one that was there before, and where one list's tensors are in another.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace minddp {

// Remembers which tensor it was, without keeping it alive: `.grad` may be replaced at any time.
class SameTensor {
 public:
  SameTensor() = default;
  SameTensor& operator=(const at::Tensor& tensor) {
    impl_ = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
    return *this;
  }
  bool operator==(const at::Tensor& tensor) const {
    return tensor.defined() && impl_._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  }

 private:
  // The weak reference keeps the address from being given to another tensor.
  c10::weak_intrusive_ptr<c10::TensorImpl> impl_{c10::intrusive_ptr<c10::TensorImpl>()};
};

// Of each of `tensors`: its index in `others`, or -1.
inline std::vector<int64_t> indices_in(
    const std::vector<at::Tensor>& others, const std::vector<at::Tensor>& tensors) {
  std::unordered_map<const at::TensorImpl*, int64_t> found;
  for (const at::Tensor& t : others) found.emplace(t.unsafeGetTensorImpl(), found.size());
  std::vector<int64_t> indices;
  for (const at::Tensor& t : tensors) {
    auto it = found.find(t.unsafeGetTensorImpl());
    indices.push_back(it == found.end() ? -1 : it->second);
  }
  return indices;
}

}  // namespace minddp
