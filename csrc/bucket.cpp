#include "bucket.h"

#include "errors.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#ifdef MINDDP_WITH_CUDA
#include "cuda/scaled_copy.h"
#endif

namespace minddp {
namespace {

// Devices without a kernel of ours: the same arithmetic, one ATen call a piece.
void reference_copy(
    const std::vector<CopySegment>& segments,
    at::Device device,
    at::ScalarType src_type,
    at::ScalarType dst_type,
    double scale) {
  for (const CopySegment& s : segments) {
    at::Tensor dst = at::from_blob(s.dst, {s.numel}, at::dtype(dst_type).device(device));
    if (s.src == nullptr) {
      dst.zero_();
      continue;
    }
    at::Tensor src = at::from_blob(const_cast<void*>(s.src), {s.numel}, at::dtype(src_type).device(device));
    dst.copy_(scale == 1.0 ? src : src.mul(scale));
  }
}

void copy_segments(
    const std::vector<CopySegment>& segments,
    at::Device device,
    at::ScalarType src_type,
    at::ScalarType dst_type,
    double scale) {
  if (segments.empty()) {
    return;
  }
  if (device.is_cpu()) {
    scaled_copy(segments.data(), segments.size(), src_type, dst_type, scale);
    return;
  }
#ifdef MINDDP_WITH_CUDA
  if (device.is_cuda()) {
    cuda::scaled_copy(segments, src_type, dst_type, scale, device.index());
    return;
  }
#endif
  reference_copy(segments, device, src_type, dst_type, scale);
}

}  // namespace

Bucket::Bucket(
    const std::vector<size_t>& indices,
    const std::vector<at::Tensor>& parameters,
    const std::vector<std::string>& names,
    Options options)
    : options_(options), grad_dtype_(parameters[indices[0]].scalar_type()) {
  slots_.reserve(indices.size());
  segments_.reserve(indices.size());
  for (size_t index : indices) {
    const at::Tensor& p = parameters[index];
    // autograd's layout contract: a gradient has its parameter's strides where those are dense,
    // else it is contiguous.
    auto strides = p.is_non_overlapping_and_dense()
        ? p.strides().vec()
        : at::empty(p.sizes(), p.options().device(at::kMeta)).strides().vec();
    slots_.push_back({index, p, names[index], numel_, p.numel(), std::move(strides), {}});
    numel_ += p.numel();
  }
}

void Bucket::allocate() {
  auto options = slots_[0].parameter.options().dtype(options_.buffer_dtype).requires_grad(false);
  buffer_ = at::empty({numel_}, options);
  for (Slot& slot : slots_) {
    // set_ instead of as_strided: no autograd view, so that users may call grad.detach_().
    slot.view = at::empty({0}, options).set_(
        buffer_.storage(), slot.offset, slot.parameter.sizes(), slot.strides);
  }
}

void Bucket::release() {
  buffer_ = at::Tensor();
  for (Slot& slot : slots_) {
    slot.view = at::Tensor();
  }
}

void Bucket::begin_backward() {
  state_ = State::kFilling;
  pending_ = slots_.size();
  producers_.clear();
  future_.reset();
}

bool Bucket::mark_ready() {
  if (!device().is_cpu()) {
    c10::Stream current = c10::impl::VirtualGuardImpl(device().type()).getStream(device());
    if (std::find(producers_.begin(), producers_.end(), current) == producers_.end()) {
      producers_.push_back(current);
    }
  }
  return --pending_ == 0;
}

void Bucket::wait_for_producers() {
  if (producers_.empty()) {
    return;
  }
  c10::Stream current = c10::impl::VirtualGuardImpl(device().type()).getStream(device());
  for (const c10::Stream& producer : producers_) {
    if (producer != current) {
      c10::Event event(device().type());
      event.record(producer);
      event.block(current);
    }
  }
}

void Bucket::pack(double scale) {
  c10::NoGradGuard no_grad;
  wait_for_producers();
  options_.sparse ? pack_sparse(scale) : pack_dense(scale);
  state_ = State::kPacked;
}

void Bucket::check_gradient(const Slot& slot, const at::Tensor& grad) const {
  bool sparse = grad.layout() != at::kStrided;
  TORCH_CHECK(
      sparse == options_.sparse, errors::unexpected_layout(options_.rank, slot.name, options_.sparse));
  TORCH_CHECK(
      grad.device() == device(),
      errors::wrong_device(options_.rank, slot.name, grad.device().str(), device().str()));
}

// True when the gradient's memory is one piece in the slot's order, of the expected dtype.
bool Bucket::contiguous_piece(const Slot& slot, const at::Tensor& grad) const {
  return grad.strides() == at::IntArrayRef(slot.strides) && grad.scalar_type() == grad_dtype_ &&
      grad.sizes() == slot.parameter.sizes() && !grad.is_conj() && !grad.is_neg();
}

void Bucket::pack_dense(double scale) {
  if (!buffer_.defined()) {
    allocate();
  }
  segments_.clear();
  char* base = static_cast<char*>(buffer_.mutable_data_ptr());
  const int64_t element = buffer_.element_size();
  for (Slot& slot : slots_) {
    at::Tensor& grad = slot.parameter.mutable_grad();
    void* dst = base + slot.offset * element;
    if (!grad.defined()) {
      segments_.push_back({nullptr, dst, slot.numel});
      continue;
    }
    check_gradient(slot, grad);
    if (contiguous_piece(slot, grad)) {
      segments_.push_back({grad.const_data_ptr(), dst, slot.numel});
    } else {
      slot.view.copy_(grad);
      slot.view.mul_(scale);
    }
  }
  copy_segments(segments_, device(), grad_dtype_, options_.buffer_dtype, scale);
  if (!options_.gradient_as_view) {
    return;
  }
  for (Slot& slot : slots_) {
    at::Tensor& grad = slot.parameter.mutable_grad();
    // A gradient with a graph of its own (create_graph=True) keeps it; unpack writes its values.
    if (grad.defined() && !grad.requires_grad() && !grad.is_same(slot.view)) {
      if (producers_.size() > 1) {
        grad.record_stream(c10::impl::VirtualGuardImpl(device().type()).getStream(device()));
      }
      grad = slot.view;
    }
  }
}

void Bucket::pack_sparse(double scale) {
  Slot& slot = slots_[0];
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (grad.defined()) {
    check_gradient(slot, grad);
    buffer_ = grad;
  } else {
    buffer_ = at::zeros(slot.parameter.sizes(), slot.parameter.options().layout(at::kSparse));
  }
  if (scale != 1.0) {
    buffer_.mul_(scale);
  }
}

void Bucket::launched(c10::intrusive_ptr<c10::ivalue::Future> future) {
  future_ = std::move(future);
  state_ = State::kLaunched;
}

void Bucket::unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) {
  c10::NoGradGuard no_grad;
  future_.reset();
  if (options_.sparse) {
    if (used[slots_[0].index]) {
      slots_[0].parameter.mutable_grad() = scale == 1.0 ? result : result.mul(scale);
    }
    buffer_ = at::Tensor();
    return;
  }
  at::Tensor flat = result.reshape({-1}).contiguous();
  const char* base = static_cast<const char*>(flat.const_data_ptr());
  const int64_t element = flat.element_size();
  segments_.clear();
  for (Slot& slot : slots_) {
    if (!used[slot.index]) {
      continue;
    }
    at::Tensor& grad = slot.parameter.mutable_grad();
    if (!grad.defined()) {
      grad = options_.gradient_as_view
          ? slot.view
          : at::empty_strided(
                slot.parameter.sizes(), slot.strides, slot.parameter.options().requires_grad(false));
    }
    const void* src = base + slot.offset * element;
    if (!contiguous_piece(slot, grad)) {
      at::Tensor piece = flat.narrow(0, slot.offset, slot.numel);
      grad.copy_(piece.as_strided(slot.parameter.sizes(), slot.strides, piece.storage_offset()));
      grad.mul_(scale);
    } else if (src != grad.const_data_ptr() || scale != 1.0) {
      segments_.push_back({src, grad.mutable_data_ptr(), slot.numel});
    }
  }
  copy_segments(segments_, device(), flat.scalar_type(), grad_dtype_, scale);
}

at::Tensor Bucket::zeros_like_buffer() const {
  if (options_.sparse) {
    return at::zeros(slots_[0].parameter.sizes(), slots_[0].parameter.options().layout(at::kSparse));
  }
  return at::zeros({numel_}, slots_[0].parameter.options().dtype(options_.buffer_dtype).requires_grad(false));
}

}  // namespace minddp
