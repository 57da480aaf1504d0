#include "gradient_noise.h"

#include "support/sum_of_squares.h"

#include <cmath>
#include <limits>

namespace minddp {

// NaN: cannot be measured.
double GradientNoise::measure(size_t index) const {
  const at::Tensor& grad = state_.parameters[index].grad();
  if (!grad.defined()) return 0.0;
  return can_square(grad) ? sum_of_squares(grad) : std::numeric_limits<double>::quiet_NaN();
}

// What earlier backwards have left under no_sync is sent, too. The first gradient of this one is there already.
void GradientNoise::on_begin() {
  active_ = std::exchange(asked_, false);
  before_ = after_ = 0;
  for (size_t i = 0; active_ && i < own_.size(); ++i) own_[i] = measure(i);
}

void GradientNoise::on_arrival(ArrivedGradient& arrival) {
  if (active_ && state_.backward.is_synchronized() && arrival.in_grad) own_[arrival.index] = measure(arrival.index);
}

void GradientNoise::after_unpack(const Bucket& bucket, const std::vector<int32_t>& used) {
  for (const Bucket::Slot& slot : *bucket.slots()) {
    if (!active_ || !used[slot.index]) continue;
    before_ += own_[slot.index];
    after_ += measure(slot.index);
  }
}

void GradientNoise::on_end(bool done) {
  last_.reset();
  if (done && active_ && std::isfinite(before_) && std::isfinite(after_)) last_ = {before_, after_};
  active_ = false;
}

}  // namespace minddp
