#include "bucket.h"

#include "support/errors.h"
#include "support/own_windows.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace minddp {

// Offsets count elements without padding: that a buffer is one tensor of all gradients is what hooks rely on.
Bucket::Bucket(const std::vector<size_t>& indices, const std::vector<at::Tensor>& parameters,
    const std::vector<std::string>& names, Options options)
    : options_(options), grad_dtype_(parameters[indices[0]].scalar_type()), device_(parameters[indices[0]].device()),
      producers_(device_) {
  for (size_t index : indices) {
    const at::Tensor& p = parameters[index];
    // autograd's layout contract: a gradient has its parameter's strides where those are dense, else it is
    // contiguous.
    at::Tensor layout = p.is_non_overlapping_and_dense() ? p : at::empty(p.sizes(), at::kMeta);
    slots_->push_back({index, names[index], p, numel_, layout.strides().vec(), {}});
    numel_ += p.numel();
  }
  segments_.reserve(slots_->size());
  begin_backward();
}

// Lazily, at the first pack: a bucket whose gradient can be its own buffer never has memory of its own.
void Bucket::allocate() {
  auto options = slots_->front().parameter.options().dtype(options_.buffer_dtype).requires_grad(false);
  buffer_ = options_.allocate ? options_.allocate(numel_, options) : at::empty({numel_}, options);
  for (Slot& s : *slots_) s.view = window(buffer_, s);
}

// Before bytes are copied: the copying pass takes pointers, and would read a gradient of another kind all the same.
void Bucket::check(Slot& slot, const at::Tensor& grad) const {
  bool right_dtype = options_.any_grad_dtype || grad.scalar_type() == grad_dtype_;
  if (grad.is_sparse() == options_.sparse && grad.device() == device_ && right_dtype) return;
  TORCH_CHECK(false,
      errors::wrong_gradient(options_.rank, slot.name,
          errors::kind(grad.is_sparse(), grad.scalar_type(), grad.device()),
          errors::kind(options_.sparse, grad_dtype_, device_)));
}

// Waits for every stream that made a gradient; the collective's stream will wait for this one.
void Bucket::pack(double scale, const std::vector<int32_t>& used, const at::Tensor& contribution, bool may_grow) {
  c10::NoGradGuard no_grad;
  producers_.wait();
  state_ = State::kPacked;
  if (options_.sparse)
    pack_sparse(scale);
  else if (can_borrow(used, contribution))
    borrow(scale, may_grow);
  else
    pack_dense(0, slots_->size(), scale, may_grow);
  producers_.note_packed();
}

// See bucket.h; packing the rest later skips what is packed.
void Bucket::pack_early(size_t i, double scale, bool may_grow) {
  if (slots_->size() > 1 && device_.is_cpu()) pack_dense(i, i + 1, scale, may_grow);
}

// Where the scale has been applied to the memory that grew, the two contributions cannot be told apart.
bool Bucket::repack(size_t i, double scale) {
  Slot& slot = (*slots_)[i];
  const at::Tensor& grad = slot.grad();
  const bool in_place = borrowed_ ? !options_.sparse : grad.defined() && grad.is_same(slot.view);
  const bool scaled_in_place = slot.packed && in_place && scale != 1.0 && slot.left == 1.0;
  if (state_ == State::kLaunched || scaled_in_place) return false;
  slot.packed = false;
  state_ = State::kFilling;
  if (borrowed_) release();
  return true;
}

// What was packed before it was known whether it would grow is scaled now.
void Bucket::before_launch() {
  producers_.wait_packed();
  for (Slot& slot : *slots_)
    if (const double left = std::exchange(slot.left, 1.0); left != 1.0)
      buffer_.narrow(0, slot.offset, slot.parameter.numel()).mul_(left);
}

// Gradients of one dtype in one piece are gathered to segments, so that one call of the copying pass serves them all;
// the others are copied by torch's operators, one by one.
void Bucket::pack_dense(size_t begin, size_t end, double scale, bool may_grow) {
  c10::NoGradGuard no_grad;
  if (!buffer_.defined()) allocate();
  const double left = may_grow && options_.gradient_as_view ? std::exchange(scale, 1.0) : 1.0;
  segments_.clear();
  at::ScalarType dtype = grad_dtype_;  // of the segments so far; under mixed precision gradients may have another
  auto copy_segments = [&] {
    scaled_copy(segments_, device_, dtype, options_.buffer_dtype, scale);
    segments_.clear();
  };
  char* base = static_cast<char*>(buffer_.mutable_data_ptr());
  for (size_t i = begin; i < end; ++i) {
    Slot& slot = (*slots_)[i];
    if (std::exchange(slot.packed, true)) continue;
    slot.left = left;
    const at::Tensor& grad = slot.grad();
    void* dst = base + slot.offset * buffer_.element_size();
    if (grad.defined()) check(slot, grad);
    if (!grad.defined())
      segments_.push_back({nullptr, dst, slot.parameter.numel()});
    else if (is_one_piece(slot, grad) && can_cast(grad.scalar_type())) {
      if (grad.scalar_type() != dtype) copy_segments();
      dtype = grad.scalar_type();
      segments_.push_back({grad.const_data_ptr(), dst, grad.numel()});
    } else
      slot.view.copy_(grad).mul_(scale);
  }
  copy_segments();
  if (options_.gradient_as_view)
    for (size_t i = begin; i < end; ++i) adopt_view((*slots_)[i]);
}

// A collective that has ended is waited for, which orders streams; one that has not keeps its memory to itself.
void Bucket::abandon() {
  producers_.wait_packed();
  if (flight_.future && flight_.future->completed()) {
    flight_.future->wait();  // on a device it may only be enqueued
    if (flight_.work && !device_.is_cpu()) flight_.work->synchronize();
  } else if (flight_.future && options_.gradient_as_view && !options_.sparse) {
    for (Slot& slot : *slots_)
      if (at::Tensor& grad = slot.grad(); grad.defined() && grad.is_alias_of(buffer_)) grad = grad.clone();
  }
  flight_ = {};
  release();
  begin_backward();
}

// A gradient with a graph of its own (create_graph=True) stays; unpack writes its values.
void Bucket::adopt_view(Slot& slot) {
  at::Tensor& grad = slot.grad();
  if (!grad.defined() || grad.requires_grad() || grad.is_same(slot.view)) return;
  producers_.keep(grad);
  grad = slot.view;
}

// What the first backward would refuse (another dtype, say) it still finds.
void Bucket::adopt_gradients() {
  if (!options_.gradient_as_view || options_.sparse) return;
  c10::NoGradGuard no_grad;
  for (Slot& slot : *slots_) {
    const at::Tensor& grad = slot.grad();
    if (!grad.defined() || grad.requires_grad() || grad.is_sparse() || grad.scalar_type() != options_.buffer_dtype ||
        grad.device() != device_ || grad.sizes() != slot.parameter.sizes())
      continue;
    if (!buffer_.defined()) allocate();
    slot.view.copy_(grad);
    adopt_view(slot);
  }
}

// What is unused on all ranks must stay as it was, and what others hold must not change under their hands.
bool Bucket::can_borrow(const std::vector<int32_t>& used, const at::Tensor& contribution) const {
  const Slot& slot = slots_->front();
  const at::Tensor& grad = slot.grad();
  bool has_place = options_.allocate || options_.buffer_dtype != grad_dtype_;
  return options_.gradient_as_view && slots_->size() == 1 && !has_place && used[slot.index] && grad.defined() &&
      !grad.requires_grad() && !grad.is_sparse() && grad.scalar_type() == grad_dtype_ && is_one_piece(slot, grad) &&
      is_sole_holder(grad, contribution);
}

// Makes the only gradient itself the buffer: flat, in the order of its memory.
void Bucket::borrow(double scale, bool may_grow) {
  Slot& slot = slots_->front();
  const at::Tensor& grad = slot.grad();
  buffer_ = at::empty({0}, grad.options()).set_(grad.storage(), grad.storage_offset(), {numel_}, {1});
  slot.left = may_grow ? std::exchange(scale, 1.0) : 1.0;
  if (scale != 1.0) buffer_.mul_(scale);
  borrowed_ = slot.packed = true;
}

// A tensor of its own, with the only gradient's entries.
void Bucket::pack_sparse(double scale) {
  Slot& slot = slots_->front();
  const at::Tensor& grad = slot.grad();
  if (grad.defined()) check(slot, grad);
  buffer_ = grad.defined() ? grad.clone().mul_(scale) : zeros();
  borrowed_ = slot.packed = true;
}

// Of the kind that other ranks send, or the collective would not fit theirs.
at::Tensor Bucket::zeros() const {
  const at::Tensor& p = slots_->front().parameter;
  auto options = p.options().dtype(options_.buffer_dtype).requires_grad(false);
  if (!options_.sparse) return at::zeros({numel_}, options);
  // As an embedding's: one index an entry, which is a row.
  return at::_sparse_coo_tensor_with_dims(1, p.dim() - 1, p.sizes(), options.layout(at::kSparse));
}

// The reduced tensor becomes the gradient: ranks have different rows, so the old one has no place for them.
void Bucket::unpack_sparse(const at::Tensor& result, double scale) {
  Slot& slot = slots_->front();
  slot.grad() = scale == 1.0 ? result : result.mul(scale);
}

// On the CPU, where allocations are not ordered by streams. What was the gradient's memory is the next buffer.
bool Bucket::exchange(const at::Tensor& result, double scale) {
  Slot& slot = slots_->front();
  at::Tensor& grad = slot.grad();
  if (slots_->size() != 1 || !device_.is_cpu() || borrowed_ || options_.allocate || options_.gradient_as_view ||
      !grad.defined() || grad.requires_grad() || result.scalar_type() != grad_dtype_ ||
      grad.scalar_type() != grad_dtype_ || !result.is_same(buffer_) || !is_one_piece(slot, grad))
    return false;
  // The buffer's memory is held by itself and by the slot's window.
  if (!exchange_memory(grad, buffer_, 2)) return false;
  slot.view = window(buffer_, slot);
  if (scale != 1.0) grad.mul_(scale);
  return true;
}

// The reverse of pack_dense; a gradient that is a window on the buffer has its result already, and costs nothing.
void Bucket::unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) {
  c10::NoGradGuard no_grad;
  const bool ours = bool(flight_.work);  // on the CPU: no hook has seen the buffer, and may have kept it
  flight_ = {};
  if (options_.sparse) {
    if (used[slots_->front().index]) unpack_sparse(result, scale);
    return release();
  }
  if (ours && used[slots_->front().index] && exchange(result, scale)) return;
  at::Tensor flat = result.reshape({-1}).contiguous();
  const char* base = static_cast<const char*>(flat.const_data_ptr());
  segments_.clear();
  for (Slot& slot : *slots_) {
    const at::Tensor& p = slot.parameter;
    at::Tensor& grad = slot.grad();
    if (!used[slot.index]) continue;                             // nowhere: what all ranks have stays
    if (!grad.defined() || grad.scalar_type() != grad_dtype_) {  // the latter under mixed precision
      grad = options_.gradient_as_view
          ? (borrowed_ ? window(buffer_, slot) : slot.view)
          : at::empty_strided(p.sizes(), slot.strides, p.options().dtype(grad_dtype_).requires_grad(false));
    }
    const void* src = base + slot.offset * flat.element_size();
    if (!is_one_piece(slot, grad))
      grad.copy_(flat.as_strided(p.sizes(), slot.strides, flat.storage_offset() + slot.offset)).mul_(scale);
    else if (src != grad.const_data_ptr() || scale != 1.0)
      segments_.push_back({src, grad.mutable_data_ptr(), p.numel()});
  }
  scaled_copy(segments_, device_, flat.scalar_type(), grad_dtype_, scale);
  if (borrowed_) release();
}

}  // namespace minddp
