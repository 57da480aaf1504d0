#include "sparse_bucket.h"

#include "copy/scale_in_place.h"
#include "copy/streams.h"
#include "sparse_allreduce.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace minddp {

void SparseBucket::fill(size_t, size_t, const Packing& how) {
  Slot& slot = slots_->front();
  const at::Tensor& grad = slot.grad();
  if (grad.defined()) check(slot, grad, at::kSparse);
  if (grad.defined()) check_memory(slot, grad._values());
  buffer_ = grad.defined() ? grad.clone() : zeros();
  scale_in_place(buffer_, how.scale);
  slot.packed = true;
}

bool SparseBucket::repack(size_t i, double scale) {
  if (!Bucket::repack(i, scale)) return false;
  release();
  return true;
}

void SparseBucket::unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) {
  c10::NoGradGuard no_grad;
  flight_ = {};
  Slot& slot = slots_->front();
  record_current_stream(result);  // allocated on the stream of the launch; it becomes the gradient, or goes now
  if (used[slot.index]) slot.grad() = scale == 1.0 ? result : result.mul(scale);
  release();
}

// As an embedding's gradient: one index an entry, which is a row.
at::Tensor SparseBucket::zeros() const {
  const at::Tensor& p = slots_->front().parameter;
  return at::_sparse_coo_tensor_with_dims(1, p.dim() - 1, p.sizes(), buffer_options().layout(at::kSparse));
}

std::unique_ptr<Bucket> SparseBuckets::make_bucket(const std::vector<size_t>& indices, Bucket::Options& options) {
  if (!expect_sparse_.at(indices[0])) return nullptr;
  options.buffer_dtype = state().parameters[indices[0]].scalar_type();
  return std::make_unique<SparseBucket>(indices, state().parameters, state().names, options);
}

std::optional<Flight> SparseBuckets::all_reduce(Bucket&, const at::Tensor& buffer, const Wait& wait) {
  if (!buffer.is_sparse()) return {};
  return Flight{sparse_allreduce(*state().group, buffer, wait)};
}

}  // namespace minddp
