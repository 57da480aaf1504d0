#include "gradient_norms.h"

#include "support/sum_of_squares.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace minddp {

namespace {
uint32_t version_of(const at::Tensor& grad) { return grad.is_inference() ? 0 : grad._version(); }
}  // namespace

GradientNorms::GradientNorms(ReducerState& state)
    : state_(state), own_(state.parameters.size(), 0.0), averages_(state.parameters.size()) {
  for (const at::Tensor& parameter : state.parameters) index_.emplace(parameter.unsafeGetTensorImpl(), index_.size());
}

// Nobody can have written to such a gradient without a trace: no Python object has ever stood for it (an object lives
// as long as its tensor), and no other tensor has its memory. `.grad.data` and `.grad.numpy()` raise no version
// counter, but need that object.
bool GradientNorms::is_unseen(const at::Tensor& grad) const {
  return grad.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() == nullptr && grad.storage().use_count() == 1;
}

// NaN: cannot be measured.
double GradientNorms::measure(size_t index) const {
  const at::Tensor& grad = state_.parameters[index].grad();
  if (!grad.defined()) return 0.0;
  return can_square(grad) ? sum_of_squares(grad) : std::numeric_limits<double>::quiet_NaN();
}

// Null where it is to be read.
const double* GradientNorms::kept(const at::Tensor& parameter, const at::Tensor& grad) const {
  const auto index = index_.find(parameter.unsafeGetTensorImpl());
  if (index == index_.end()) return nullptr;
  const Measured& then = averages_[index->second];
  const bool same = then.grad == grad.unsafeGetTensorImpl() && then.version == version_of(grad) && is_unseen(grad);
  return same ? &then.square : nullptr;
}

// Added up in the order that is given, whatever was measured before: the same bits.
std::pair<std::optional<at::Tensor>, int64_t> GradientNorms::total(const std::vector<at::Tensor>& parameters) {
  asked_ = std::max(asked_, Question::kAverages);
  std::optional<at::ScalarType> dtype;
  double sum = 0;
  int64_t read = 0;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined()) continue;
    if (!can_square(grad)) return {std::nullopt, read};
    const double* square = kept(parameter, grad);
    sum += square ? *square : sum_of_squares(grad);
    read += square == nullptr;
    dtype = dtype ? at::promote_types(*dtype, grad.scalar_type()) : grad.scalar_type();
  }
  if (!dtype) return {std::nullopt, read};
  return {at::scalar_tensor(std::sqrt(sum), at::kDouble).to(*dtype), read};  // infinite where it is too large
}

std::optional<std::pair<double, double>> GradientNorms::noise() {
  asked_ = Question::kNoise;
  return noise_;
}

// What earlier backwards have left under no_sync is sent, too. The first gradient of this one is there already.
void GradientNorms::on_begin() {
  active_ = std::exchange(asked_, Question::kNone);
  before_ = after_ = 0;
  std::ranges::fill(averages_, Measured());
  for (size_t i = 0; active_ == Question::kNoise && i < own_.size(); ++i) own_[i] = measure(i);
}

void GradientNorms::on_arrival(ArrivedGradient& arrival) {
  averages_[arrival.index] = {};  // a new gradient may have an old one's address
  if (active_ == Question::kNoise && state_.backward.is_synchronized() && arrival.in_grad)
    own_[arrival.index] = measure(arrival.index);
}

// What is not kept would be read again when somebody asks.
void GradientNorms::after_unpack(const Bucket& bucket, const std::vector<int32_t>& used) {
  for (const Bucket::Slot& slot : *bucket.slots()) {
    if (active_ == Question::kNone || !used[slot.index]) continue;
    const at::Tensor& grad = state_.parameters[slot.index].grad();
    const bool is_kept = grad.defined() && !state_.is_shared && can_square(grad) && is_unseen(grad);
    if (!is_kept && active_ != Question::kNoise) continue;
    const double square = measure(slot.index);
    if (is_kept) averages_[slot.index] = {grad.unsafeGetTensorImpl(), version_of(grad), square};
    before_ += own_[slot.index];
    after_ += square;
  }
}

void GradientNorms::on_end(bool done) {
  noise_.reset();
  const bool found = done && active_ == Question::kNoise && std::isfinite(before_) && std::isfinite(after_);
  if (found) noise_ = {before_, after_};
  active_ = Question::kNone;
}

}  // namespace minddp
