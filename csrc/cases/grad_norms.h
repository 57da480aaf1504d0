// Case: somebody wants to know the gradients' norms (clip_grad_norm_, grad_norm, gradient_noise_scale).
//
// A gradient is read once more while it is in the cache: this rank's own when it arrives, the average when it has
// been unpacked, which other buckets' transfers hide. Measured from the first question on, and until an iteration
// passes that nobody asks about. CPU only: elsewhere a read is a kernel, and torch's own norm is as good.
#pragma once

#include "reducer/state.h"

#include <array>
#include <limits>
#include <optional>
#include <utility>

namespace minddp {

class GradNorms : public Case {
 public:
  explicit GradNorms(ReducerState& state);

  // Asks for the next iteration's. `local`: those of this rank's own gradients, too.
  void ask(bool local);
  // The squared 2-norm of all gradients that are as they were measured, and the other gradients.
  std::pair<double, std::vector<at::Tensor>> averaged() const;
  // In the last iteration: the squared 2-norm of this rank's own gradients, and of what they became. Nothing where
  // one of them was not measured.
  std::optional<std::pair<double, double>> before_and_after() const { return last_; }

  void on_begin() override;
  void on_arrival(ArrivedGradient& arrival) override;
  void after_unpack(const Bucket& bucket, const std::vector<int32_t>& used) override;
  void on_end(bool done) override;

 private:
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  // What a gradient was when it was measured. Writes that do not raise the version (through `.data`, NumPy) are seen
  // by a sample of the values.
  struct Measured {
    double square = kNone;
    const void* memory = nullptr;
    uint32_t version = 0;
    std::array<double, 8> sample{};
  };
  static Measured measure(const at::Tensor& grad);
  static bool is_the_same(const Measured& measured, const at::Tensor& grad);

  ReducerState& state_;
  struct Wanted {
    bool averages = false, local = false;
  };
  Wanted asked_, active_;  // since the last iteration began; in this one
  std::vector<Measured> measured_;
  std::vector<double> local_;  // by parameter, as it has arrived; 0 where none has
  std::optional<std::pair<double, double>> last_;
};

}  // namespace minddp
