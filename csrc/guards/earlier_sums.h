// Case: the reduction is no mean, and a gradient still holds the result of an earlier one.
//
// A mean of equal numbers is that number, so a mean may be taken of whole gradients, with earlier means in them. A
// sum would count the earlier one once a rank: whoever has not called zero_grad() is refused.
#pragma once

#include "reducer/events.h"
#include "seen_gradient.h"

#include <vector>

namespace minddp {

class EarlierSums : public Case {
 public:
  bool needs_before_accumulation() const override { return true; }
  void before_accumulation(size_t index) override;
  void on(Moment moment) override;
  void averages_written(const Bucket& bucket, const std::vector<int32_t>& used) override;
  void take_over(const Case& before, const std::vector<int64_t>& there, bool same_group) override;

 private:
  void refuse(size_t index);

  std::vector<SeenGradient> results_;  // by parameter: the `.grad` that holds the last sum
};

}  // namespace minddp
