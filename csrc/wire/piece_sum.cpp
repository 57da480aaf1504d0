#include "piece_sum.h"

#include <ATen/ATen.h>

namespace minddp {
namespace {

void add_on_host(at::ScalarType dtype, const std::vector<at::Tensor>& pieces) {
  std::vector<const void*> sources;
  for (const at::Tensor& piece : pieces) sources.push_back(piece.const_data_ptr());
  const int64_t numel = pieces[0].numel() / int64_t(at::elementSize(dtype));
  reduce_function(c10d::ReduceOp::SUM, dtype)(
      pieces[0].mutable_data_ptr(), sources.data(), int(sources.size()), numel);
}

void add_on_device(at::ScalarType dtype, const std::vector<at::Tensor>& pieces) {
  const bool widens = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor first = pieces[0].view(dtype), sum = widens ? first.to(at::kFloat) : first;
  for (size_t k = 1; k < pieces.size(); ++k) sum.add_(pieces[k].view(dtype));
  if (widens) first.copy_(sum);
}

}  // namespace

PieceSum sum_of_elements(at::ScalarType dtype) {
  return {int64_t(at::elementSize(dtype)), [dtype](const std::vector<at::Tensor>& pieces, int64_t) {
            pieces[0].is_cpu() ? add_on_host(dtype, pieces) : add_on_device(dtype, pieces);
          }};
}

}  // namespace minddp
