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

}  // namespace

QuantizedBucket::QuantizedBucket(const std::vector<size_t>& indices, const std::vector<at::Tensor>& parameters,
    const std::vector<std::string>& names, const Options& options, std::shared_ptr<const Quantization> quantization)
    : Bucket(indices, parameters, names, options), quantization_(std::move(quantization)) {
  numel_ = 0;
  for (Slot& slot : *slots_) {
    slot.offset = numel_;
    numel_ += QuantizedBlock::count(slot.parameter.numel()) * kBytes;
  }
}

void QuantizedBucket::begin_backward() {
  if (pending_losses_) forget_losses();
  Bucket::begin_backward();
}

void QuantizedBucket::forget_losses() {
  pending_losses_ = false;
  for (const Slot& slot : *slots_)
    if (const auto& residual = quantization_->residuals[slot.index]) residual->zero_();
}

// While contributions may follow, nothing is encoded: what was lost could not be taken back.
void QuantizedBucket::fill(size_t begin, size_t end, const Packing& how) {
  scale_ = how.scale;
  used_ = &how.used;
  if (how.may_grow) return;
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
  if (grad.defined()) check(slot, grad, /*sparse=*/false);
  if (grad.defined() && !is_one_piece(slot, grad))
    grad = at::empty_strided(slot.parameter.sizes(), slot.strides, grad.options()).copy_(grad);
  const auto& residual = quantization_->residuals[slot.index];
  const at::Tensor lost = is_used && residual ? *residual : at::Tensor();
  pending_losses_ = true;
  const Rounding how = rounding((launches_ << 32) + (uint64_t(slot.index) << 8) + uint64_t(options_.rank));
  quantize(grad, scale, lost, how, blocks_at(buffer_, slot));
}

// The sums of a bucket that was given up, or of one that another bucket of the same kind has sent, are lost to the
// feedback: they are nobody's.
PieceSum QuantizedBucket::sum_of_pieces() {
  ++launches_;
  auto losses = losses_ = std::make_shared<std::vector<Loss>>();
  const bool feeds_back = std::ranges::any_of(
      *slots_, [&](const Slot& slot) { return quantization_->residuals[slot.index].has_value(); });
  const at::TensorOptions floats = buffer_options().dtype(at::kFloat);
  return {kBytes,
      [losses, feeds_back, floats, how = rounding(~launches_)](const std::vector<at::Tensor>& pieces, int64_t begin) {
        Loss loss{begin, {}};
        const int64_t blocks = pieces[0].numel() / kBytes;
        if (feeds_back) loss.numbers = at::empty({blocks * QuantizedBlock::kNumbers}, floats);
        add_quantized(pieces, {how.stochastic, how.seed + uint64_t(begin)}, loss.numbers);
        if (feeds_back) losses->push_back(std::move(loss));
      }};
}

void QuantizedBucket::unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) {
  c10::NoGradGuard no_grad;
  flight_ = {};
  for (Slot& slot : *slots_) {
    if (!used[slot.index]) continue;  // used on no rank: `.grad` stays
    at::Tensor& grad = slot.grad();
    if (!grad.defined() || grad.scalar_type() != grad_dtype_) grad = new_gradient(slot);
    const bool direct = is_one_piece(slot, grad);
    at::Tensor target = direct ? grad : at::empty_strided(slot.parameter.sizes(), slot.strides, grad.options());
    dequantize(blocks_at(result, slot), scale, target);
    if (!direct) grad.copy_(target);
  }
  if (auto losses = std::exchange(losses_, nullptr))
    for (const Loss& loss : *losses) feed_back(loss, used);
  pending_losses_ = false;
  const at::Tensor special = any_special(result);
  if (device_.is_cpu() && special.item<bool>()) forget_losses();
  if (device_.is_cpu()) return;
  for (const Slot& slot : *slots_)  // nobody waits for the answer
    if (const auto& residual = quantization_->residuals[slot.index]) residual->masked_fill_(special, 0);
}

// Slots lie in the order of their blocks.
void QuantizedBucket::feed_back(const Loss& loss, const std::vector<int32_t>& used) {
  constexpr int64_t n = QuantizedBlock::kNumbers;
  const int64_t end = loss.begin + loss.numbers.numel() / n;
  for (const Slot& slot : *slots_) {
    const int64_t first = slot.offset / kBytes, last = first + QuantizedBlock::count(slot.parameter.numel());
    const auto& residual = quantization_->residuals[slot.index];
    const int64_t from = std::max(first, loss.begin), to = std::min(last, end);
    if (from >= to || !used[slot.index] || !residual) continue;
    add_loss(loss.numbers.narrow(0, (from - loss.begin) * n, (to - from) * n),
        residual->narrow(0, (from - first) * kBytes, (to - from) * kBytes));
  }
}

std::vector<at::Tensor> dequantized(const std::vector<Bucket::Slot>& slots, const at::Tensor& buffer) {
  std::vector<at::Tensor> tensors;
  for (const Bucket::Slot& slot : slots) {
    const at::Tensor& p = slot.parameter;
    tensors.push_back(at::empty_strided(p.sizes(), slot.strides, p.options().requires_grad(false)));
    dequantize(blocks_at(buffer, slot), 1.0, tensors.back());
  }
  return tensors;
}

}  // namespace minddp
