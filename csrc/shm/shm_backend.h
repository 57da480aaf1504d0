// The shared-memory process group: a c10d Backend for the ranks of one machine.
//
// Reading order: segment (memory) -> counter (waiting) -> group (who, alive?) -> exchange (ticks) ->
// collectives, reduce, mailbox -> work (threads) -> this file, which checks arguments and makes works.
//
// What always holds
//   - Collectives run in the order of their calls, one at a time per group.
//   - Nothing hangs: a peer that dies, leaves, fails or does not come within the timeout makes the call
//     raise c10::DistBackendError with that rank's number, and breaks the group.
//   - Nothing is left behind in /dev/shm or elsewhere, however the processes end.
// Threads: any thread may call; the order of calls is the order of collectives.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "collectives.h"
#include "group.h"
#include "mailbox.h"
#include "work.h"

namespace minddp::shm {

class ShmBackend : public c10d::Backend {
 public:
  // Collective over the store's ranks; see Group::join().
  ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_.store(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return submitted_.load(); }
  void abort() override;
  void shutdown() override;

  // A tensor in shared memory: an allreduce whose tensors are such on all ranks copies nothing. It may
  // be used as any tensor, and outlive the group.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  bool is_shared(const at::Tensor& tensor) const;

  using Tensors = std::vector<at::Tensor>;
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPointer allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;
  WorkPointer send(Tensors& tensors, int to, int tag) override;
  WorkPointer recv(Tensors& tensors, int from, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;

 private:
  struct Kind;

  template <class CallOptions>
  WorkPointer submit(const Kind& kind, const CallOptions& options, const Tensors& inputs, Tensors outputs,
      std::function<void(std::chrono::milliseconds)> program);
  Call call(const at::Tensor& tensor, std::chrono::milliseconds timeout) const {
    return {tensor.scalar_type(), timeout};
  }
  void check_root(const char* what, int64_t root) const;
  void check_rank(const char* what, int rank) const;
  void check_count(const char* what, const char* argument, size_t count, size_t expected) const;
  WorkPointer receive(Tensors& tensors, int from, int tag, c10d::OpType type);
  void stop(std::chrono::milliseconds patience);

  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> submitted_{0};
  std::unique_ptr<Group> group_;
  Collectives collectives_;
  Mailbox mailbox_;
  Receiver receiver_;
  WorkQueue queue_;
};

}  // namespace minddp::shm
