// Whether a tensor is the one that was there before.
#pragma once

#include <ATen/core/Tensor.h>

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

}  // namespace minddp
