// Case: somebody asks for norms of gradients: of the averages, to clip them, or also of this rank's own gradients,
// for the gradient noise scale.
//
// In the iteration after a question alone. An average is read once more when its bucket has been unpacked: it may be
// in the cache, and later buckets are still on their way. A gradient of this rank is read when it arrives. CPU only.
#pragma once

#include "reducer/state.h"

#include <optional>
#include <unordered_map>
#include <utility>

namespace minddp {

class GradientNorms : public Case {
 public:
  explicit GradientNorms(ReducerState& state);

  // The 2-norm of the gradients of `parameters` together, without dimensions, in the dtype that holds all of theirs;
  // and how many gradients had to be read. Those are read that were not measured when they were unpacked, or that
  // somebody may have changed since. No norm where there are none, or one cannot be measured. The next iteration
  // measures.
  std::pair<std::optional<at::Tensor>, int64_t> total(const std::vector<at::Tensor>& parameters);
  // Of the last iteration: the squared 2-norm of this rank's own gradients, and of what they became. Nothing where
  // nobody had asked before it, a gradient cannot be measured, or one of the two is not finite. The next iteration
  // measures.
  std::optional<std::pair<double, double>> noise();

  void on_begin() override;
  void on_arrival(ArrivedGradient& arrival) override;
  void after_unpack(const Bucket& bucket, const std::vector<int32_t>& used) override;
  void on_end(bool done) override;

 private:
  enum class Question { kNone, kAverages, kNoise };
  // A gradient, as it was when it was measured.
  struct Measured {
    const at::TensorImpl* grad = nullptr;
    uint32_t version = 0;
    double square = 0;
  };
  double measure(size_t index) const;
  const double* kept(const at::Tensor& parameter, const at::Tensor& grad) const;
  bool is_unseen(const at::Tensor& grad) const;

  ReducerState& state_;
  std::unordered_map<const at::TensorImpl*, size_t> index_;      // by parameter
  Question asked_ = Question::kNone, active_ = Question::kNone;  // since the last iteration began; in this one
  std::vector<double> own_;                                      // by parameter, squared
  std::vector<Measured> averages_;                               // the same
  double before_ = 0, after_ = 0;
  std::optional<std::pair<double, double>> noise_;
};

}  // namespace minddp
