// The shared-memory process group: a c10d Backend for the ranks of one machine.
//
// It does one thing, the all-reduce of dense CPU tensors, and the barrier that goes with it. Every other call goes to
// `rest`, a Gloo group of the same ranks, and what Gloo says is the answer. The two transports know nothing of each
// other: each runs its own calls in the order of their calls.
//
// Reading order: owner (fork) -> segment (memory) -> counter (waiting) -> group (who, alive?) -> exchange (ticks) ->
// allreduce -> work (the thread) -> this file. minddp/shm/__init__.py is where ranks meet, through the Gloo group.
//
// What always holds
//   - All-reduces run in the order of their calls, one at a time per group.
//   - Nothing hangs: a peer that dies, leaves, fails or does not come within the timeout makes the call raise
//     c10::DistBackendError with that rank's number, and breaks the group.
//   - Ranks whose all-reduces do not fit together raise, all of them, in that call.
//   - Nothing is left behind in /dev/shm or elsewhere, however the processes end.
//   - A forked child is no rank: every call raises there, and nothing that it does or that ends with it reaches the
//     parent or its peers (owner.h).
// Security: beside Gloo's, no socket; no name in any file system, no pickle. The processes of the same user are
// trusted (segment.h), and the Gloo group for who is a rank.
// Threads: any thread may call; the order of calls is the order of all-reduces.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "allreduce.h"
#include "group.h"
#include "owner.h"
#include "work.h"

namespace minddp::shm {

class ShmBackend : public c10d::Backend {
 public:
  using Rest = c10::intrusive_ptr<c10d::Backend>;
  using Tensors = std::vector<at::Tensor>;
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;

  // Of `rest`'s ranks. Cards by rank. Throws as Group's constructor.
  ShmBackend(
      Rest rest, std::shared_ptr<Segment> own, const std::vector<Card>& cards, std::chrono::milliseconds timeout);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override { rest("setSequenceNumberForGroup").setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override;
  void abort() override;
  void shutdown() override;

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;

  // Gloo's.
  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return rest("allreduce_sparse").allreduce_sparse(tensors, options);
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return rest("allreduce_coalesced").allreduce_coalesced(tensors, options);
  }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return rest("broadcast").broadcast(tensors, options);
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return rest("reduce").reduce(tensors, options);
  }
  WorkPointer allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return rest("allgather").allgather(outputs, inputs, options);
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return rest("allgather")._allgather_base(output, input, options);
  }
  WorkPointer allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return rest("allgather_coalesced").allgather_coalesced(outputs, inputs, options);
  }
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return rest("allgather").allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return rest("gather").gather(outputs, inputs, options);
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return rest("scatter").scatter(outputs, inputs, options);
  }
  WorkPointer reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return rest("reduce_scatter").reduce_scatter(outputs, inputs, options);
  }
  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return rest("reduce_scatter")._reduce_scatter_base(output, input, options);
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return rest("reduce_scatter").reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return rest("alltoall").alltoall_base(output, input, output_splits, input_splits, options);
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return rest("alltoall").alltoall(outputs, inputs, options);
  }
  WorkPointer send(Tensors& tensors, int to, int tag) override { return rest("send").send(tensors, to, tag); }
  WorkPointer recv(Tensors& tensors, int from, int tag) override { return rest("recv").recv(tensors, from, tag); }
  WorkPointer recvAnysource(Tensors& tensors, int tag) override { return rest("recv").recvAnysource(tensors, tag); }

 private:
  // Refers to nothing of the backend, which may be gone before the work is.
  using Program = std::function<void(Allreduce&, std::chrono::milliseconds timeout)>;

  WorkPointer submit(c10d::OpType type, const char* title, const Tensors& tensors, std::chrono::milliseconds timeout,
      Program program);
  void check_owner(const char* what) const;
  c10d::Backend& rest(const char* what) const;
  void stop(std::chrono::milliseconds patience);

  const Owner owner_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> submitted_{0};
  // In a forked child Gloo's destructor would wait for threads that are not there.
  const std::shared_ptr<Rest> rest_;
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Allreduce> allreduce_;
  const std::shared_ptr<WorkQueue> queue_;
};

}  // namespace minddp::shm
