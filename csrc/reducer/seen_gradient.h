// A gradient as it was at some moment, without keeping its memory alive: `.grad` may be replaced at any time.
//
// What is remembered is the memory, and torch's count of the writes to it; of a sparse gradient, whose memory changes
// with each write, the tensor. (torch.utils.swap_tensors refuses tensors that have a weak reference.)
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace minddp {

class SeenGradient {
 public:
  SeenGradient() = default;
  // REQUIRES: `gradient` is defined.
  SeenGradient& operator=(const at::Tensor& gradient) {
    const at::Storage& memory = memory_of(gradient);
    if (memory)
      target_ = memory.getWeakStorageImpl();
    else
      target_ = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(gradient.getIntrusivePtr());
    offset_ = offset_in(memory, gradient);
    writes_ = writes_to(gradient);
    return *this;
  }
  // Whether `gradient` is that one. It may have been written to.
  bool is(const at::Tensor& gradient) const {
    if (!gradient.defined()) return false;
    const at::Storage& memory = memory_of(gradient);
    const c10::intrusive_ptr_target* target = memory.unsafeGetStorageImpl();
    if (!memory) target = gradient.unsafeGetTensorImpl();
    return target == target_._unsafe_get_target() && offset_in(memory, gradient) == offset_;
  }
  bool is_unchanged(const at::Tensor& gradient) const { return is(gradient) && writes_to(gradient) == writes_; }

 private:
  static const at::Storage& memory_of(const at::Tensor& gradient) {
    return gradient.unsafeGetTensorImpl()->unsafe_storage();
  }
  static int64_t offset_in(const at::Storage& memory, const at::Tensor& gradient) {
    return memory ? gradient.storage_offset() : 0;
  }
  static uint32_t writes_to(const at::Tensor& gradient) { return gradient.is_inference() ? 0 : gradient._version(); }

  // Keeps the address from being given to another one.
  c10::weak_intrusive_ptr<c10::intrusive_ptr_target> target_{c10::intrusive_ptr<c10::intrusive_ptr_target>()};
  int64_t offset_ = 0;
  uint32_t writes_ = 0;
};

// Whether a gradient holds a value other than zero, on its device.
inline at::Tensor has_values(const at::Tensor& gradient) {
  return (gradient.is_sparse() ? gradient.coalesce().values() : gradient).any();
}

// By parameter: whether it is one of `indices`, and its `.grad`, which is defined then, holds such a value. The host
// waits for a device once.
inline std::vector<char> with_values(const std::vector<at::Tensor>& parameters, const std::vector<size_t>& indices) {
  std::vector<char> found(parameters.size(), 0);
  std::vector<at::Tensor> answers;
  for (size_t i : indices) answers.push_back(has_values(parameters[i].grad()).to(parameters[indices[0]].device()));
  if (answers.empty()) return found;
  const at::Tensor all = at::stack(answers).cpu();
  for (size_t k = 0; k < indices.size(); ++k) found[indices[k]] = all.const_data_ptr<bool>()[k];
  return found;
}

}  // namespace minddp
