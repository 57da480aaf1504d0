#include "bucket.h"

#include "errors.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace minddp {

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

void Bucket::allocate() {
  auto options = slots_->front().parameter.options().dtype(options_.buffer_dtype).requires_grad(false);
  buffer_ = options_.allocate ? options_.allocate(numel_, options) : at::empty({numel_}, options);
  for (Slot& s : *slots_)  // set_ instead of as_strided: no autograd view, so users may detach_() gradients
    s.view = at::empty({0}, options).set_(buffer_.storage(), s.offset, s.parameter.sizes(), s.strides);
}

void Bucket::check(const Slot& slot, const at::Tensor& grad) const {
  if (grad.is_sparse() == options_.sparse && grad.device() == device_) return;
  auto kind = [](bool sparse, at::Device device) { return (sparse ? "sparse on " : "dense on ") + device.str(); };
  TORCH_CHECK(false,
      errors::wrong_gradient(
          options_.rank, slot.name, kind(grad.is_sparse(), grad.device()), kind(options_.sparse, device_)));
}

// The gradient's memory is one piece in the slot's order, of the expected dtype.
bool Bucket::is_one_piece(const Slot& slot, const at::Tensor& grad) const {
  return grad.strides() == at::IntArrayRef(slot.strides) && grad.scalar_type() == grad_dtype_ &&
      grad.sizes() == slot.parameter.sizes() && !grad.is_conj() && !grad.is_neg();
}

void Bucket::pack(double scale, const std::vector<int32_t>& used, const at::Tensor& contribution) {
  c10::NoGradGuard no_grad;
  producers_.wait();
  state_ = State::kPacked;
  if (options_.sparse || can_borrow(used, contribution))
    borrow(scale);
  else
    pack_dense(0, slots_->size(), scale);
}

void Bucket::pack_early(size_t i, double scale) {
  constexpr size_t kLarge = 32 << 10;  // below, one pass over all is cheaper
  if (slots_->size() > 1 && device_.is_cpu() && (*slots_)[i].parameter.nbytes() >= kLarge)
    pack_dense(i, i + 1, scale);
}

bool Bucket::repack(size_t i, double scale) {
  Slot& slot = (*slots_)[i];
  bool scaled_in_place = slot.packed && scale != 1.0 && (borrowed_ || slot.parameter.grad().is_same(slot.view));
  if (state_ == State::kLaunched || scaled_in_place) return false;
  slot.packed = false;
  state_ = State::kFilling;
  return true;
}

void Bucket::pack_dense(size_t begin, size_t end, double scale) {
  c10::NoGradGuard no_grad;
  if (!buffer_.defined()) allocate();
  segments_.clear();
  char* base = static_cast<char*>(buffer_.mutable_data_ptr());
  for (size_t i = begin; i < end; ++i) {
    Slot& slot = (*slots_)[i];
    if (std::exchange(slot.packed, true)) continue;
    const at::Tensor& grad = slot.parameter.mutable_grad();
    void* dst = base + slot.offset * buffer_.element_size();
    if (grad.defined()) check(slot, grad);
    if (!grad.defined())
      segments_.push_back({nullptr, dst, slot.parameter.numel()});
    else if (is_one_piece(slot, grad))
      segments_.push_back({grad.const_data_ptr(), dst, grad.numel()});
    else
      slot.view.copy_(grad).mul_(scale);
  }
  scaled_copy(segments_, device_, grad_dtype_, options_.buffer_dtype, scale);
  if (options_.gradient_as_view)
    for (size_t i = begin; i < end; ++i) adopt_view((*slots_)[i]);
}

// A gradient with a graph of its own (create_graph=True) stays; unpack writes its values.
void Bucket::adopt_view(Slot& slot) {
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (!grad.defined() || grad.requires_grad() || grad.is_same(slot.view)) return;
  producers_.keep(grad);
  grad = slot.view;
}

// What is unused on all ranks must stay as it was, and what others hold must not change under their hands.
bool Bucket::can_borrow(const std::vector<int32_t>& used, const at::Tensor& contribution) const {
  const Slot& slot = slots_->front();
  const at::Tensor& grad = slot.parameter.grad();
  bool has_place = options_.gradient_as_view || options_.allocate || options_.buffer_dtype != grad_dtype_;
  return slots_->size() == 1 && !has_place && used[slot.index] && grad.defined() && !grad.requires_grad() &&
      !grad.is_sparse() && is_one_piece(slot, grad) && is_sole_holder(grad, contribution);
}

// Makes the only gradient itself the buffer.
void Bucket::borrow(double scale) {
  Slot& slot = slots_->front();
  const at::Tensor& grad = slot.parameter.grad();
  if (grad.defined()) check(slot, grad);
  if (options_.sparse)
    buffer_ = grad.defined() ? grad : zeros();
  else  // flat, in the order of its memory
    buffer_ = at::empty({0}, grad.options()).set_(grad.storage(), grad.storage_offset(), {numel_}, {1});
  if (scale != 1.0) buffer_.mul_(scale);
  borrowed_ = slot.packed = true;
}

at::Tensor Bucket::zeros() const {
  const at::Tensor& p = slots_->front().parameter;
  auto options = p.options().dtype(options_.buffer_dtype).requires_grad(false);
  return options_.sparse ? at::zeros(p.sizes(), options.layout(at::kSparse)) : at::zeros({numel_}, options);
}

void Bucket::unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) {
  c10::NoGradGuard no_grad;
  future_.reset();
  if (options_.sparse) {
    if (used[slots_->front().index])
      slots_->front().parameter.mutable_grad() = scale == 1.0 ? result : result.mul(scale);
    return release();
  }
  at::Tensor flat = result.reshape({-1}).contiguous();
  const char* base = static_cast<const char*>(flat.const_data_ptr());
  segments_.clear();
  for (Slot& slot : *slots_) {
    if (!used[slot.index]) continue;
    const at::Tensor& p = slot.parameter;
    at::Tensor& grad = p.mutable_grad();
    if (!grad.defined() || grad.scalar_type() != grad_dtype_) {  // the latter under mixed precision
      grad = options_.gradient_as_view
          ? slot.view
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
