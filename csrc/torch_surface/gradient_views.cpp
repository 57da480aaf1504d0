#include "gradient_views.h"

#include "view_bucket.h"

#include <ATen/ATen.h>

namespace minddp {

// Gradients that travel in another dtype are no views.
std::unique_ptr<Bucket> GradientViews::make_bucket(const std::vector<size_t>& indices, Bucket::Options& options) {
  if (options.buffer_dtype != state().parameters[indices[0]].scalar_type()) return nullptr;
  return std::make_unique<ViewBucket>(indices, state().parameters, state().names, options);
}

void GradientViews::on(Moment moment) {
  if (moment == Moment::kIterationBegin) bring_views_home();
}

void GradientViews::adopt_gradients() {
  for (auto& bucket : state().buckets)
    if (auto* views = dynamic_cast<ViewBucket*>(bucket.get())) views->adopt_gradients();
}

// A view that lies elsewhere now is the program's, and the slot gets another one. A gradient that lies in another's
// view gets memory of its own.
void GradientViews::bring_views_home() {
  for (auto& bucket : state().buckets) {
    const at::Tensor& buffer = bucket->buffer();
    if (!buffer.defined() || !buffer.has_storage()) continue;
    for (auto& slot : *bucket->slots()) {
      if (!slot.view.defined()) continue;
      const bool at_home = slot.view.is_alias_of(buffer) && slot.view.strides() == at::IntArrayRef(slot.strides) &&
          slot.view.storage_offset() == buffer.storage_offset() + slot.offset;
      if (!at_home) slot.view = view_of(buffer, slot);
    }
  }
  for (auto& bucket : state().buckets) {
    for (auto& slot : *bucket->slots()) {
      at::Tensor& grad = slot.parameter.mutable_grad();
      if (grad.defined() && !grad.is_same(slot.view) && grad.has_storage() && is_displaced(grad)) grad = grad.clone();
    }
  }
}

// It begins where another parameter's view does. Where the view's parameter has the same gradient, the program has
// made them one, and they stay so.
bool GradientViews::is_displaced(const at::Tensor& grad) const {
  const auto begin_alike = [](const at::Tensor& a, const at::Tensor& b) {
    return a.defined() && a.has_storage() && a.const_data_ptr() == b.const_data_ptr();
  };
  for (auto& bucket : state().buckets) {
    const at::Tensor& buffer = bucket->buffer();
    if (!buffer.defined() || !buffer.has_storage() || !buffer.is_alias_of(grad)) continue;
    for (auto& slot : *bucket->slots())
      if (begin_alike(slot.view, grad)) return !begin_alike(slot.parameter.grad(), grad);
  }
  return false;
}

}  // namespace minddp
