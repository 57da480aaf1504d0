#include "comm_hook.h"

#include <ATen/ATen.h>

namespace minddp {

std::vector<at::Tensor> GradBucket::gradients() const {
  if (buffer_.is_sparse()) return {buffer_};
  std::vector<at::Tensor> tensors;
  for (const Bucket::Slot& s : slots_)
    tensors.push_back(buffer_.as_strided(s.parameter.sizes(), s.strides, buffer_.storage_offset() + s.offset));
  return tensors;
}

std::vector<at::Tensor> GradBucket::parameters() const {
  std::vector<at::Tensor> tensors;
  for (const Bucket::Slot& slot : slots_) tensors.push_back(slot.parameter);
  return tensors;
}

c10::intrusive_ptr<Future> allreduce(c10d::ProcessGroup& group, const at::Tensor& tensor, bool average) {
  c10d::AllreduceOptions options;
  options.reduceOp = average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
  std::vector<at::Tensor> tensors = {tensor.is_complex() ? at::view_as_real(tensor) : tensor};
  return group.allreduce(tensors, options)->getFuture();
}

}  // namespace minddp
