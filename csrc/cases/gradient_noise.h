// Case: somebody asks for the gradient noise scale, which compares the norms of this rank's own gradients with those
// of the averages.
//
// Each gradient is read once more while it is in the cache: when it arrives, and when its average has been unpacked.
// In the iteration after a question alone. CPU only.
#pragma once

#include "reducer/state.h"

#include <optional>
#include <utility>

namespace minddp {

class GradientNoise : public Case {
 public:
  explicit GradientNoise(ReducerState& state) : state_(state), own_(state.parameters.size(), 0.0) {}

  void ask() { asked_ = true; }  // for the next iteration's
  // In the last iteration: the squared 2-norm of this rank's own gradients, and of what they became. Nothing where
  // nobody had asked, a gradient cannot be measured, or one of the two is not finite.
  std::optional<std::pair<double, double>> norms() const { return last_; }

  void on_begin() override;
  void on_arrival(ArrivedGradient& arrival) override;
  void after_unpack(const Bucket& bucket, const std::vector<int32_t>& used) override;
  void on_end(bool done) override;

 private:
  double measure(size_t index) const;

  ReducerState& state_;
  bool asked_ = false, active_ = false;  // since the last iteration began; in this one
  std::vector<double> own_;              // by parameter, squared
  double before_ = 0, after_ = 0;
  std::optional<std::pair<double, double>> last_;
};

}  // namespace minddp
