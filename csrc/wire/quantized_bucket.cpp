#include "quantized_bucket.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace minddp {
namespace {

constexpr int64_t kBytes = sizeof(QuantizedBlock);

at::Tensor blocks_at(const at::Tensor& buffer, const Bucket::Slot& slot) {
  return buffer.narrow(0, slot.offset, QuantizedBlock::count(slot.parameter.numel()) * kBytes);
}

at::Tensor blocks_of(const at::Tensor& bytes, int64_t begin, int64_t end) {
  return bytes.narrow(0, begin * kBytes, (end - begin) * kBytes);
}

}  // namespace

QuantizedBucket::QuantizedBucket(const std::vector<size_t>& indices, const std::vector<at::Tensor>& parameters,
    const std::vector<std::string>& names, const Options& options, std::shared_ptr<const Residuals> residuals)
    : Bucket(indices, parameters, names, options), residuals_(std::move(residuals)) {
  numel_ = 0;
  for (Slot& slot : *slots_) {
    slot.offset = numel_;
    numel_ += QuantizedBlock::count(slot.parameter.numel()) * kBytes;
  }
}

void QuantizedBucket::begin_iteration() {
  if (pending_losses_) forget_losses();
  Bucket::begin_iteration();
}

void QuantizedBucket::forget_losses() {
  pending_losses_ = false;
  for (const Slot& slot : *slots_)
    if (const auto& residual = (*residuals_)[slot.index]) residual->zero_();
}

// While contributions may follow, nothing is encoded: what was lost could not be taken back.
void QuantizedBucket::fill(size_t begin, size_t end, const Packing& how) {
  scale_ = how.scale;
  used_ = &how.used;
  if (how.more_may_come) return;
  for (size_t i = begin; i < end; ++i) encode(i, how.scale, how.used[(*slots_)[i].index]);
}

void QuantizedBucket::before_launch() {
  Bucket::before_launch();
  for (size_t i = 0; i < slots_->size(); ++i) encode(i, scale_, (*used_)[(*slots_)[i].index]);
}

void QuantizedBucket::encode(size_t i, double scale, bool is_used) {
  Slot& slot = (*slots_)[i];
  if (std::exchange(slot.packed, true)) return;
  c10::NoGradGuard no_grad;
  if (!buffer_.defined()) allocate();
  at::Tensor grad = slot.grad();
  if (grad.defined() && !is_ready_to_copy(slot, grad))
    grad = at::empty_strided(slot.parameter.sizes(), slot.strides, grad.options()).copy_(grad);
  const auto& residual = (*residuals_)[slot.index];
  const at::Tensor lost = is_used && residual ? *residual : at::Tensor();
  pending_losses_ = true;
  quantize(grad, scale, lost, blocks_at(buffer_, slot));
}

// A rank that only takes part, inside of join(), feeds nothing back: nobody would tell it to forget.
PieceSum QuantizedBucket::sum_of_pieces() {
  summing_ = std::make_shared<Summing>(pending_losses_);
  struct Part {  // a parameter's blocks
    int64_t begin, end;
    at::Tensor residual;
  };
  std::vector<Part> parts;
  unused_.clear();
  for (size_t i = 0; i < slots_->size(); ++i) {
    const Slot& slot = (*slots_)[i];
    const int64_t begin = slot.offset / kBytes;
    const at::Tensor residual = (*residuals_)[slot.index].value_or(at::Tensor());
    parts.push_back({begin, begin + QuantizedBlock::count(slot.parameter.numel()), residual});
    if (pending_losses_ && residual.defined() && !(*used_)[slot.index]) unused_.emplace_back(i, residual.clone());
  }
  auto add = [parts, summing = summing_](const std::vector<at::Tensor>& pieces, int64_t begin) {
    const int64_t end = begin + pieces[0].numel() / kBytes;
    std::lock_guard lock(summing->mutex);
    for (const Part& part : parts) {
      const int64_t from = std::max(part.begin, begin), to = std::min(part.end, end);
      if (from >= to) continue;
      std::vector<at::Tensor> its;
      for (const at::Tensor& piece : pieces) its.push_back(blocks_of(piece, from - begin, to - begin));
      const bool feeds_back = part.residual.defined() && summing->feeds_back;
      const at::Tensor lost =
          feeds_back ? blocks_of(part.residual, from - part.begin, to - part.begin) : at::Tensor();
      if (feeds_back) record_current_stream(lost);  // the transport's, while it enqueues
      add_quantized(its, lost);
    }
  };
  return {kBytes, std::move(add)};
}

// What is summed from here on is nobody's.
void QuantizedBucket::leave_to_collective() {
  std::lock_guard lock(summing_->mutex);
  summing_->feeds_back = false;
}

void QuantizedBucket::unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) {
  c10::NoGradGuard no_grad;
  flight_ = {};
  for (Slot& slot : *slots_) {
    if (!used[slot.index]) continue;  // used on no rank: `.grad` stays
    const bool direct = is_ready_to_write(slot);
    at::Tensor& grad = slot.grad();
    at::Tensor target = direct ? grad : at::empty_strided(slot.parameter.sizes(), slot.strides, grad.options());
    dequantize(blocks_at(result, slot), scale, target);
    if (!direct) grad.copy_(target);
  }
  take_back(used);
  pending_losses_ = false;
  const at::Tensor special = any_special(result);
  if (device_.is_cpu() && special.item<bool>()) forget_losses();
  if (device_.is_cpu()) return;
  for (const Slot& slot : *slots_)  // nobody waits for the answer
    if (const auto& residual = (*residuals_)[slot.index]) residual->masked_fill_(special, 0);
}

// The copies were made on the stream of the launch, and this one has only now been given what reads them.
void QuantizedBucket::take_back(const std::vector<int32_t>& used) {
  for (const auto& [i, residual] : unused_) {
    if (const size_t index = (*slots_)[i].index; !used[index]) (*residuals_)[index]->copy_(residual);
    record_current_stream(residual);
  }
  unused_.clear();
}

// Of blocks of codes, the numbers in them: copies. A hook may have put plain numbers into the buffer's place.
Bucket::GradientsIn QuantizedBucket::gradients_in() const {
  return [](const std::vector<Slot>& slots, const at::Tensor& buffer) {
    if (buffer.scalar_type() != at::kByte) return views_in(slots, buffer);
    std::vector<at::Tensor> tensors;
    for (const Slot& slot : slots) {
      const at::Tensor& p = slot.parameter;
      tensors.push_back(at::empty_strided(p.sizes(), slot.strides, p.options().requires_grad(false)));
      dequantize(blocks_at(buffer, slot), 1.0, tensors.back());
    }
    return tensors;
  };
}

std::unique_ptr<Bucket> QuantizedBuckets::make_bucket(const std::vector<size_t>& indices, Bucket::Options& options) {
  if (options.buffer_dtype != at::kByte) return nullptr;
  TORCH_CHECK(residuals_->size() == state().parameters.size(), "residuals: one for each parameter");
  return std::make_unique<QuantizedBucket>(indices, state().parameters, state().names, options, residuals_);
}

}  // namespace minddp
