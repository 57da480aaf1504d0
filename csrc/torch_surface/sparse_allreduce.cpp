#include "sparse_allreduce.h"

#include "copy/streams.h"

#include <ATen/ATen.h>

namespace minddp {
namespace {

// Every rank's `mine`, in rank order. REQUIRES: the same shape on all ranks.
std::vector<at::Tensor> all_gather(c10d::ProcessGroup& group, const at::Tensor& mine, const Wait& wait) {
  std::vector<std::vector<at::Tensor>> theirs(1);
  for (int rank = 0; rank < group.getSize(); ++rank) theirs[0].push_back(at::empty_like(mine));
  std::vector<at::Tensor> inputs = {mine};
  auto work = group.allgather(theirs, inputs);
  wait(*work->getFuture());
  if (!mine.device().is_cpu()) order_streams(*work);
  return theirs[0];
}

// Every rank's rows of `mine`, one after another; `counts` says how many each has. Padded to the longest on the way.
at::Tensor all_gather_rows(
    c10d::ProcessGroup& group, const at::Tensor& mine, const std::vector<int64_t>& counts, const Wait& wait) {
  std::vector<int64_t> shape = mine.sizes().vec();
  shape[0] = *std::max_element(counts.begin(), counts.end());
  at::Tensor padded = at::zeros(shape, mine.options());
  if (padded.numel() == 0) return padded;
  padded.narrow(0, 0, mine.size(0)).copy_(mine);
  std::vector<at::Tensor> rows = all_gather(group, padded, wait);
  for (size_t rank = 0; rank < rows.size(); ++rank) rows[rank] = rows[rank].narrow(0, 0, counts[rank]);
  return at::cat(rows);
}

}  // namespace

c10::intrusive_ptr<c10::ivalue::Future> sparse_allreduce(
    c10d::ProcessGroup& group, const at::Tensor& tensor, const Wait& wait) {
  at::Tensor mine = tensor.coalesce();
  at::Tensor count = at::full({1}, mine._nnz(), mine._indices().options());
  std::vector<int64_t> counts;
  for (const at::Tensor& theirs : all_gather(group, count, wait)) counts.push_back(theirs.item<int64_t>());
  at::Tensor all_indices = all_gather_rows(group, mine._indices().t().contiguous(), counts, wait).t();
  at::Tensor all_values = all_gather_rows(group, mine._values().contiguous(), counts, wait);
  at::Tensor sum =
      at::_sparse_coo_tensor_unsafe(all_indices, all_values, tensor.sizes(), tensor.options()).coalesce();
  record_current_stream(tensor);  // its memory, which was allocated where it was packed, goes now
  tensor.copy_(sum);
  return completed(tensor);
}

}  // namespace minddp
