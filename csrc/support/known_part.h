// What of a gradient every rank has already: the result of the reduction before, under what has grown on it since.
//
// A sum of whole gradients would count that part once a rank. So it is left out of what a rank sends, and added to
// what comes back. (A mean needs no such care: the mean of equal numbers is that number.)
//
// A gradient is its own known part until autograd adds to it; the last moment to copy it is just before.
#pragma once

#include "errors.h"
#include "same_tensor.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace minddp {

class KnownPart {
 public:
  // `.grad` holds a reduction's result, and nothing else.
  void note_result(const at::Tensor& grad) { result_ = grad; }
  void before_growth(const at::Tensor& grad, int rank, const std::string& name) {
    const c10::NoGradGuard no_grad;  // backward may be making a graph
    check_unchanged(grad, rank, name);
    if (result_ == grad) tensor_ = grad.clone();
    result_ = SameTensor();
  }
  void after_growth(const at::Tensor& grad) {
    grown_ = grad;
    version_ = grad._version();
  }
  // Raises where the program has changed what grew: what is known lies in it as it was, and would be taken out as
  // that. To be called before packing.
  void check_unchanged(const at::Tensor& grad, int rank, const std::string& name) {
    drop_stale(grad);
    if (tensor_.defined() && grad._version() != version_) TORCH_CHECK(false, errors::changed_in_place(rank, name));
  }
  // To be asked before packing: whether nothing of `.grad` is to be sent. It is kept then.
  bool is_all_of(const at::Tensor& grad) {
    drop_stale(grad);
    if (!(result_ == grad)) return false;
    tensor_ = grad.clone();
    return true;
  }
  const at::Tensor& tensor() const { return tensor_; }  // undefined: nothing is known
  void forget() { tensor_ = at::Tensor(); }
  // `.grad` holds the reduction of what has grown: together they are a result.
  void complete(at::Tensor& grad) {
    if (tensor_.defined() && grad.is_sparse()) grad = at::add(grad, tensor_);
    if (tensor_.defined() && !grad.is_sparse()) grad.add_(tensor_);
    forget();
    note_result(grad);
  }

 private:
  // Of a .grad that has been set to none, replaced, or zeroed in place since it grew nothing of the result is left.
  void drop_stale(const at::Tensor& grad) {
    if (!tensor_.defined()) return;
    auto zeroed = [&] {
      at::Tensor values = grad.is_sparse() ? grad.coalesce().values() : grad;
      return grad._version() != version_ && !values.any().item<bool>();
    };
    if (!(grown_ == grad) || zeroed()) tensor_ = at::Tensor();
  }

  SameTensor result_;     // .grad, where it is a result that has not grown
  at::Tensor tensor_;     // that result, once .grad has grown
  SameTensor grown_;      // which .grad that was
  uint32_t version_ = 0;  // of that
};

}  // namespace minddp
