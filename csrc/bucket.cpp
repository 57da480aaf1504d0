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

void Bucket::pack(double scale) {
  c10::NoGradGuard no_grad;
  producers_.wait();
  state_ = State::kPacked;
  if (options_.sparse) return pack_sparse(scale);
  if (!buffer_.defined()) allocate();
  segments_.clear();
  char* base = static_cast<char*>(buffer_.mutable_data_ptr());
  for (Slot& slot : *slots_) {
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
  if (options_.gradient_as_view) adopt_views();
}

// A gradient with a graph of its own (create_graph=True) stays; unpack writes its values.
void Bucket::adopt_views() {
  for (Slot& slot : *slots_) {
    at::Tensor& grad = slot.parameter.mutable_grad();
    if (!grad.defined() || grad.requires_grad() || grad.is_same(slot.view)) continue;
    producers_.keep(grad);
    grad = slot.view;
  }
}

void Bucket::pack_sparse(double scale) {
  const at::Tensor& parameter = slots_->front().parameter;
  buffer_ = parameter.mutable_grad();
  if (buffer_.defined())
    check(slots_->front(), buffer_);
  else
    buffer_ = zeros();
  if (scale != 1.0) buffer_.mul_(scale);
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
}

}  // namespace minddp
