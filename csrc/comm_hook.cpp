#include "comm_hook.h"

#include <ATen/ATen.h>

namespace minddp {

std::vector<at::Tensor> GradBucket::gradients() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(pieces_.size());
  for (const Piece& piece : pieces_) {
    tensors.push_back(
        buffer_.is_sparse()
            ? buffer_
            : buffer_.as_strided(
                  piece.parameter.sizes(), piece.strides, buffer_.storage_offset() + piece.offset));
  }
  return tensors;
}

std::vector<at::Tensor> GradBucket::parameters() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(pieces_.size());
  for (const Piece& piece : pieces_) {
    tensors.push_back(piece.parameter);
  }
  return tensors;
}

c10::intrusive_ptr<Future> allreduce(c10d::ProcessGroup& group, const at::Tensor& tensor, bool average) {
  c10d::AllreduceOptions options;
  options.reduceOp = average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
  std::vector<at::Tensor> tensors = {tensor.is_complex() ? at::view_as_real(tensor) : tensor};
  return group.allreduce(tensors, options)->getFuture();
}

}  // namespace minddp
