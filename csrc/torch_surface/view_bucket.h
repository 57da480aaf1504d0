// Case: gradient_as_bucket_view. `.grad` is a view on the bucket's buffer from pack on, and shows what is there.
//
// A gradient alone in its bucket is not copied where nobody else holds its memory: that memory is the buffer. What is
// added to a view after it was packed lands in the buffer, so the scale is left to the end while more may come.
#pragma once

#include "reducer/bucket.h"

namespace minddp {

class ViewBucket : public Bucket {
 public:
  ViewBucket(const std::vector<size_t>& indices, const std::vector<at::Tensor>& parameters,
      const std::vector<std::string>& names, Options options)
      : Bucket(indices, parameters, names, options), left_(indices.size(), 1.0) {}
  void begin_iteration() override;
  bool repack(size_t i, double scale) override;
  void before_launch() override;
  void unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) override;
  void release() override;
  void move_gradients(std::vector<at::Tensor>* places) override;
  void adopt_gradients();  // moves gradients that exist already into the buffer
  bool is_plain() const override { return false; }

 protected:
  void fill(size_t begin, size_t end, const Packing& how) override;
  at::Tensor new_gradient(const Slot& slot) const override { return borrowed_ ? view_of(buffer_, slot) : slot.view; }
  void leave_to_collective() override;

 private:
  bool can_borrow(const Packing& how) const;
  void borrow(const Packing& how);
  void adopt(Slot& slot);

  std::vector<double> left_;  // by slot: what it is to be multiplied with before the bucket leaves
  bool borrowed_ = false;     // buffer_ is the gradient's own memory
};

}  // namespace minddp
