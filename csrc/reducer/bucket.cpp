#include "bucket.h"

#include "copy/in_memory.h"
#include "copy/scale_in_place.h"
#include "errors.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>

namespace minddp {

// No padding: communication hooks expect the buffer to be all gradients, flattened, and nothing else.
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
  begin_iteration();
}

void Bucket::begin_iteration() {
  state_ = State::kFilling;
  pending_ = slots_->size();
  producers_.clear();
  for (Slot& slot : *slots_) slot.packed = false;
}

// Strides of dimensions of size 1 say nothing: convolutions in channels_last leave them arbitrary.
bool Bucket::is_one_piece(const Slot& slot, const at::Tensor& grad) {
  if (!lies_in_memory(grad) || grad.sizes() != slot.parameter.sizes()) return false;
  for (int64_t d = 0; d < grad.dim(); ++d)
    if (grad.size(d) != 1 && grad.stride(d) != slot.strides[d]) return false;
  return true;
}

std::vector<at::Tensor> Bucket::views_in(const std::vector<Slot>& slots, const at::Tensor& buffer) {
  std::vector<at::Tensor> views;
  for (const Slot& s : slots)
    views.push_back(buffer.as_strided(s.parameter.sizes(), s.strides, buffer.storage_offset() + s.offset));
  return views;
}

// The first pack calls it, so a bucket that never packs has no buffer.
void Bucket::allocate() {
  buffer_ = options_.allocate ? options_.allocate(numel_, buffer_options()) : at::empty({numel_}, buffer_options());
  for (Slot& slot : *slots_) slot.view = view_of(buffer_, slot);
}

void Bucket::release() {
  buffer_ = at::Tensor();
  for (Slot& slot : *slots_) slot.view = at::Tensor();
}

// Dtype and length as other ranks send them, so that the collectives match.
at::Tensor Bucket::zeros() const { return at::zeros({numel_}, buffer_options()); }

// The current stream waits for every stream that made a gradient. The collective's stream will wait for the current
// one.
void Bucket::pack(const Packing& how) {
  c10::NoGradGuard no_grad;
  producers_.wait();
  state_ = State::kPacked;
  fill(0, slots_->size(), how);
  producers_.note_packed();
}

void Bucket::check(const Slot& slot, const at::Tensor& grad, at::Layout layout) const {
  bool right_dtype = options_.any_grad_dtype || grad.scalar_type() == grad_dtype_;
  if (grad.layout() == layout && grad.device() == device_ && right_dtype) return;
  TORCH_CHECK(false,
      errors::wrong_gradient(options_.rank, slot.name, errors::kind(grad.layout(), grad.scalar_type(), grad.device()),
          errors::kind(layout, grad_dtype_, device_)));
}

// The copy takes raw pointers and would misread a gradient of another kind.
bool Bucket::is_ready_to_copy(const Slot& slot, const at::Tensor& grad) const {
  check(slot, grad, at::kStrided);
  if (is_one_piece(slot, grad)) return true;
  check_memory(slot, grad);
  return false;
}

void Bucket::check_memory(const Slot& slot, const at::Tensor& numbers) const {
  if (is_readable(numbers)) return;
  const size_t expected = size_t(numbers.numel() * numbers.element_size());
  TORCH_CHECK(false, errors::no_memory(options_.rank, slot.name, bytes_there(numbers), expected));
}

// A zero tensor cannot be written to, nor an expanded one: several of its elements are one.
bool Bucket::is_ready_to_write(Slot& slot) {
  at::Tensor& grad = slot.grad();
  const bool fits = grad.defined() && grad.scalar_type() == grad_dtype_ && grad.device() == device_;
  if (fits && is_one_piece(slot, grad)) return true;
  const bool takes_numbers = fits && grad.layout() == at::kStrided && is_readable(grad) && !grad._is_zerotensor() &&
      at::has_internal_overlap(grad) != at::MemOverlap::Yes;
  if (takes_numbers) return false;
  grad = new_gradient(slot);
  return true;
}

// A gradient that is one piece of memory becomes a segment. One call of the copying pass serves consecutive segments
// of one dtype. Every other gradient is copied on its own, by torch's operators. Slots that are packed already are
// passed over.
void Bucket::copy_in(size_t begin, size_t end, double scale) {
  c10::NoGradGuard no_grad;
  if (!buffer_.defined()) allocate();
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
    const at::Tensor& grad = slot.grad();
    void* dst = base + slot.offset * buffer_.element_size();
    if (!grad.defined())
      segments_.push_back({nullptr, dst, slot.parameter.numel()});
    else if (is_ready_to_copy(slot, grad) && can_cast(grad.scalar_type())) {
      if (grad.scalar_type() != dtype) copy_segments();
      dtype = grad.scalar_type();
      segments_.push_back({grad.const_data_ptr(), dst, grad.numel()});
    } else
      slot.view.copy_(grad.mul(scale));
  }
  copy_segments();
}

bool Bucket::repack(size_t i, double scale) {
  (*slots_)[i].packed = false;
  state_ = State::kFilling;
  return true;
}

void Bucket::unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) {
  c10::NoGradGuard no_grad;
  copy_out(result, scale, used);
  flight_ = {};
}

at::Tensor Bucket::new_gradient(const Slot& slot) const {
  const at::Tensor& p = slot.parameter;
  return at::empty_strided(p.sizes(), slot.strides, p.options().dtype(grad_dtype_).requires_grad(false));
}

// The reverse of copy_in. A gradient that is a view of `result` is passed over, unless it must be scaled.
void Bucket::copy_out(const at::Tensor& result, double scale, const std::vector<int32_t>& used) {
  const char* base = static_cast<const char*>(result.const_data_ptr());
  segments_.clear();
  for (Slot& slot : *slots_) {
    if (!used[slot.index]) continue;  // used on no rank: `.grad` stays
    const bool direct = is_ready_to_write(slot);
    at::Tensor& grad = slot.grad();
    const void* src = base + slot.offset * result.element_size();
    if (!direct) {
      const int64_t begin = result.storage_offset() + slot.offset;
      grad.copy_(result.as_strided(slot.parameter.sizes(), slot.strides, begin));
      scale_in_place(grad, scale);
    } else if (src != grad.const_data_ptr() || scale != 1.0)
      segments_.push_back({src, grad.mutable_data_ptr(), slot.parameter.numel()});
  }
  scaled_copy(segments_, device_, result.scalar_type(), grad_dtype_, scale);
}

// On a device a complete future may only mean that the collective is enqueued, so streams are made to wait. A
// collective that still runs holds references to the buffer, and so may one that has failed: parts of it may go on.
// Nothing here uses that memory again.
void Bucket::abandon() {
  producers_.wait_packed();
  if (flight_.future && flight_.future->completed() && !flight_.future->hasError()) {
    flight_.future->wait();  // on a device it may only be enqueued
    if (flight_.work && !device_.is_cpu()) order_streams(*flight_.work);
  } else if (flight_.future)
    leave_to_collective();
  flight_ = {};
  release();
  begin_iteration();
}

}  // namespace minddp
