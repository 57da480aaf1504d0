// The shared-memory process group: a c10d Backend for the ranks of one machine.
//
// Reading order: owner (fork) -> segment (memory) -> counter (waiting) -> meeting (the store) -> group (who,
// alive?) -> exchange (ticks) -> collectives, reduce -> mailbox, messenger (messages) -> work (threads) ->
// this file, which checks arguments and makes works.
//
// What always holds
//   - Collectives run in the order of their calls, one at a time per group.
//   - Nothing hangs: a peer that dies, leaves, fails or does not come within the timeout makes the call
//     raise c10::DistBackendError with that rank's number, and breaks the group.
//   - Ranks whose calls do not fit together raise, all of them, in that call.
//   - Nothing is left behind in /dev/shm or elsewhere, however the processes end.
//   - A forked child is no rank: every call raises there, and nothing that it does or that ends with it
//     reaches the parent or its peers (owner.h).
// Security: no socket, no name in any file system, no pickle. What is trusted: the processes of the same
// user (segment.h), and the store for whom it names, not for what lies there (meeting.h, group.h).
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
#include "messenger.h"
#include "owner.h"
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
  // Refers to nothing of the backend, which may be gone before the work is.
  using Program = std::function<void(Collectives&, std::chrono::milliseconds timeout)>;

  template <class CallOptions>
  WorkPointer submit(
      const Kind& kind, const CallOptions& options, const Tensors& inputs, Tensors outputs, Program program);
  void check_owner(const char* what) const;
  void check_root(const char* what, int64_t root) const;
  void check_rank(const char* what, int rank) const;
  void check_count(const char* what, const char* argument, size_t count, size_t expected) const;
  WorkPointer message(Tensors& tensors, int peer, int tag, c10d::OpType type);
  void stop(std::chrono::milliseconds patience);

  const Owner owner_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> submitted_{0};
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Collectives> collectives_;
  const std::shared_ptr<Messenger> messenger_;
  const std::shared_ptr<WorkQueue> queue_;
};

}  // namespace minddp::shm
