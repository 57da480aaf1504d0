// Case: gradient_as_bucket_view, where a program has moved the views.
//
// `a.grad, b.grad = b.grad, a.grad` leaves each in the other's place in the buffer. Whichever is packed first would
// be copied over what the other still accumulates into. `a.grad.data = ...`, which module.to(memory_format=...) does,
// gives the view itself other memory. When an iteration begins, each slot has its view, and no gradient lies in
// another's.
#pragma once

#include "reducer/state.h"

namespace minddp {

class MovedViews : public Case {
 public:
  explicit MovedViews(ReducerState& state) : state_(state) {}
  void on_begin() override;

 private:
  bool is_displaced(const at::Tensor& grad) const;

  ReducerState& state_;
};

}  // namespace minddp
