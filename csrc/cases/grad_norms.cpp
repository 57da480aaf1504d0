#include "grad_norms.h"

#include "support/sum_of_squares.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace minddp {

namespace {

bool is_measurable(const at::Tensor& grad) {
  return grad.defined() && grad.device().is_cpu() && grad.layout() == at::kStrided &&
      grad.is_non_overlapping_and_dense() && can_square(grad.scalar_type()) && !grad.is_inference() &&
      !grad.key_set().has(c10::DispatchKey::Python);
}

double value_at(const at::Tensor& grad, int64_t position) {
  const char* at = static_cast<const char*>(grad.const_data_ptr()) + position * grad.element_size();
  double value = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "value_at",
      [&] { value = static_cast<double>(*reinterpret_cast<const scalar_t*>(at)); });
  return value;
}

// Spread over the gradient, the first and the last among them.
std::array<double, 8> sample_of(const at::Tensor& grad) {
  std::array<double, 8> sample{};
  const int64_t last = grad.numel() - 1, gaps = int64_t(sample.size()) - 1;
  for (int64_t i = 0; last >= 0 && i <= gaps; ++i) sample[i] = value_at(grad, last * i / gaps);
  return sample;
}

// NaN is the same as NaN.
bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

GradNorms::GradNorms(ReducerState& state)
    : state_(state), measured_(state.parameters.size()), local_(state.parameters.size(), 0.0) {}

void GradNorms::ask(bool local) { asked_ = {true, asked_.local || local}; }

std::pair<double, std::vector<at::Tensor>> GradNorms::averaged() const {
  std::pair<double, std::vector<at::Tensor>> found;
  for (size_t i = 0; i < measured_.size(); ++i) {
    const at::Tensor& grad = state_.parameters[i].grad();
    if (is_the_same(measured_[i], grad))
      found.first += measured_[i].square;
    else if (grad.defined())
      found.second.push_back(grad);
  }
  return found;
}

// `.grad` holds what came before under no_sync, too: of several arrivals the last one counts.
void GradNorms::on_arrival(ArrivedGradient& arrival) {
  measured_[arrival.index].memory = nullptr;
  const bool wanted = active_.local || asked_.local;  // the first arrival comes before the iteration begins
  if (!wanted || !arrival.defined || !arrival.in_grad) return;
  const at::Tensor& grad = state_.parameters[arrival.index].grad();
  local_[arrival.index] =
      is_measurable(grad) ? sum_of_squares(grad.const_data_ptr(), grad.numel(), grad.scalar_type()) : kNone;
}

void GradNorms::after_unpack(const Bucket& bucket, const std::vector<int32_t>& used) {
  if (!active_.averages) return;
  for (const Bucket::Slot& slot : *bucket.slots())
    if (used[slot.index] && !slot.place) measured_[slot.index] = measure(slot.parameter.grad());
}

void GradNorms::on_begin() {
  active_ = std::exchange(asked_, {});
  std::ranges::fill(measured_, Measured());
}

void GradNorms::on_end(bool done) {
  last_.reset();
  if (done && active_.local) {
    double before = 0, after = 0;
    for (size_t i = 0; i < local_.size(); ++i) {
      before += local_[i];
      if (state_.parameters[i].grad().defined()) after += measured_[i].square;
    }
    if (!std::isnan(before + after)) last_ = {before, after};
  }
  std::ranges::fill(local_, 0.0);
}

GradNorms::Measured GradNorms::measure(const at::Tensor& grad) {
  if (!is_measurable(grad)) return {};
  return {sum_of_squares(grad.const_data_ptr(), grad.numel(), grad.scalar_type()), grad.const_data_ptr(),
      uint32_t(grad._version()), sample_of(grad)};
}

bool GradNorms::is_the_same(const Measured& measured, const at::Tensor& grad) {
  if (measured.memory == nullptr || !is_measurable(grad)) return false;
  if (measured.memory != grad.const_data_ptr() || measured.version != uint32_t(grad._version())) return false;
  const std::array<double, 8> now = sample_of(grad);
  return std::equal(now.begin(), now.end(), measured.sample.begin(), same);
}

}  // namespace minddp
