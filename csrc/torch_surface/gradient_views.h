// Case: gradient_as_bucket_view. Gradients are views on the buckets' buffers (view_bucket.h).
//
// A program may move the views. `a.grad, b.grad = b.grad, a.grad` leaves each in the other's place in the buffer.
// Whichever is packed first would be copied over what the other still accumulates into. `a.grad.data = ...`, which
// module.to(memory_format=...) does, gives the view itself other memory. When an iteration begins, each slot gets its
// view back, and no gradient lies in another's.
#pragma once

#include "reducer/events.h"

namespace minddp {

class GradientViews : public Case {
 public:
  std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>& indices, Bucket::Options& options) override;
  void on(Moment moment) override;
  // Turns existing gradients into views. torch's class does the same at construction: so `.grad` is a view even
  // before the first backward.
  void adopt_gradients();

 private:
  void bring_views_home();
  bool is_displaced(const at::Tensor& grad) const;
};

}  // namespace minddp
