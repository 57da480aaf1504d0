#include "view_bucket.h"

#include "copy/in_memory.h"
#include "copy/scale_in_place.h"
#include "sole_holder.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace minddp {

void ViewBucket::begin_iteration() {
  if (borrowed_) release();
  Bucket::begin_iteration();
}

void ViewBucket::release() {
  Bucket::release();
  borrowed_ = false;
}

// Windows that were made so far keep their memory to themselves.
void ViewBucket::move_gradients(std::vector<at::Tensor>* places) {
  release();
  Bucket::move_gradients(places);
}

void ViewBucket::fill(size_t begin, size_t end, const Packing& how) {
  if (can_borrow(how)) return borrow(how);
  for (size_t i = begin; i < end; ++i)
    if (!(*slots_)[i].packed) left_[i] = how.more_may_come ? how.scale : 1.0;
  copy_in(begin, end, how.more_may_come ? 1.0 : how.scale);
  for (size_t i = begin; i < end; ++i) adopt((*slots_)[i]);
}

// What is unused on all ranks must stay as it was, and what others hold must not change under their hands.
bool ViewBucket::can_borrow(const Packing& how) const {
  const Slot& slot = slots_->front();
  const at::Tensor& grad = slot.grad();
  const bool has_place = options_.allocate || options_.buffer_dtype != grad_dtype_;
  return slots_->size() == 1 && !has_place && how.used[slot.index] && grad.defined() && !grad.requires_grad() &&
      !grad.is_sparse() && grad.scalar_type() == grad_dtype_ && is_one_piece(slot, grad) &&
      is_sole_holder(grad, how.contribution);
}

// Flat, in the order of its memory.
void ViewBucket::borrow(const Packing& how) {
  Slot& slot = slots_->front();
  const at::Tensor& grad = slot.grad();
  buffer_ = at::empty({0}, grad.options()).set_(grad.storage(), grad.storage_offset(), {numel()}, {1});
  left_[0] = how.more_may_come ? how.scale : 1.0;
  if (!how.more_may_come) scale_in_place(buffer_, how.scale);
  borrowed_ = slot.packed = true;
}

// A gradient with a graph of its own (create_graph=True) stays; unpack writes its values.
void ViewBucket::adopt(Slot& slot) {
  at::Tensor& grad = slot.grad();
  if (!grad.defined() || grad.requires_grad() || grad.is_same(slot.view)) return;
  record_current_stream(grad);
  grad = slot.view;
}

// Between iterations. What the first backward would refuse (another dtype, say) it still finds.
void ViewBucket::adopt_gradients() {
  c10::NoGradGuard no_grad;
  for (Slot& slot : *slots_) {
    const at::Tensor& grad = slot.grad();
    if (!grad.defined() || grad.requires_grad() || grad.is_sparse() || grad.scalar_type() != options_.buffer_dtype ||
        grad.device() != device_ || grad.sizes() != slot.parameter.sizes() || !is_readable(grad))
      continue;
    if (!buffer_.defined()) allocate();
    slot.view.copy_(grad);
    adopt(slot);
  }
}

// Where the scale has been applied to the memory that autograd has added to, the two contributions cannot be told
// apart.
bool ViewBucket::repack(size_t i, double scale) {
  const Slot& slot = (*slots_)[i];
  const at::Tensor& grad = slot.grad();
  const bool in_place = borrowed_ || (grad.defined() && grad.is_same(slot.view));
  if (slot.packed && in_place && scale != 1.0 && left_[i] == 1.0) return false;
  if (!Bucket::repack(i, scale)) return false;
  if (borrowed_) release();
  return true;
}

// What was packed before it was known whether more would come is scaled now.
void ViewBucket::before_launch() {
  Bucket::before_launch();
  for (size_t i = 0; i < left_.size(); ++i) {
    const Slot& slot = (*slots_)[i];
    if (const double left = std::exchange(left_[i], 1.0); left != 1.0)
      scale_in_place(buffer_.narrow(0, slot.offset, slot.parameter.numel()), left);
  }
}

void ViewBucket::unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) {
  c10::NoGradGuard no_grad;
  flight_ = {};
  copy_out(result, scale, used);
  if (borrowed_) release();
}

// It may still write to the buffer: a view on that becomes a tensor of its own.
void ViewBucket::leave_to_collective() {
  for (Slot& slot : *slots_)
    if (at::Tensor& grad = slot.grad(); grad.defined() && grad.has_storage() && grad.is_alias_of(buffer_))
      grad = grad.clone();
}

}  // namespace minddp
