// Case: the reduction is no mean, and a gradient still holds the result of an earlier one.
//
// A mean of equal numbers is that number, so a mean may be taken of whole gradients, with earlier means in them. A
// sum would count the earlier one once a rank: whoever has not called zero_grad() is refused.
#pragma once

#include "context_gradients.h"
#include "reducer/state.h"

namespace minddp {

class EarlierSums : public Case {
 public:
  explicit EarlierSums(ReducerState& state) : state_(state) {}
  bool wants_growth() const override { return true; }
  void on_growth(size_t index) override {
    if (!ContextGradients::has_current()) refuse(index);  // else `.grad` does not grow
  }
  void on_begin() override {  // what does not grow is sent, too
    for (size_t i = 0; i < state_.parameters.size(); ++i) refuse(i);
  }

  void after_unpack(const Bucket& bucket, const std::vector<int32_t>& used) override {
    for (const Bucket::Slot& slot : *bucket.slots())
      if (const at::Tensor& grad = slot.parameter.grad(); used[slot.index] && grad.defined())
        state_.grads[slot.index].result = grad;
  }

 private:
  void refuse(size_t index);
  bool may_hold(size_t index) const;  // whether `.grad` is the tensor that held the last sum

  ReducerState& state_;
};

}  // namespace minddp
