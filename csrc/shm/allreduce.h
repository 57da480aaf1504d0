// The all-reduce, and a barrier, as programs of ticks (exchange.h).
//
// Tensors lie in private memory, so their data pass through the slots in pieces that stay in the cache: one more
// copy, but no more traffic to memory.
//
// What always holds
//   - All ranks get the same bits: each element is combined once, or by everyone in the order of ranks.
//   - A rank writes its own tensor only, and reads no other's: one that gives up has its tensor to itself.
//   - Whatever throws inside a call breaks the group, on this rank and on all others.
// Threads: as exchange.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "copy/reduce.h"
#include "exchange.h"

namespace minddp::shm {

// A piece of private memory.
struct Span {
  char* data;
  size_t bytes;
};

struct Reduction {
  c10d::ReduceOp::RedOpType op;
  at::ScalarType dtype;
  ReduceFunction function;
};

class Allreduce {
 public:
  explicit Allreduce(std::shared_ptr<Group> group)
      : group_(std::move(group)), exchange_(*group_), sources_(static_cast<size_t>(size())) {}

  // In place. Throws c10::DistBackendError.
  void run(Span data, const Reduction& reduction, std::chrono::milliseconds timeout);

  // Everyone has come. Throws c10::DistBackendError.
  void barrier(std::chrono::milliseconds timeout);

 private:
  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }

  void run(const Signature& signature, std::chrono::milliseconds timeout, const std::function<void()>& program);
  void run_flat(Span data, const Reduction& reduction);

  // How data are cut: into chunks, of which each rank owns a share of so many bytes.
  struct Chunks {
    Chunks(Span data, size_t ranks, size_t share_bytes);
    Span share(size_t chunk, int owner) const;  // shorter, or empty, in the last chunk

    Span data;
    size_t ranks;
    size_t share_bytes;
    size_t count;
  };
  void run_sharded(Span data, const Reduction& reduction);
  void hand_in(const Chunks& chunks, size_t chunk);
  void reduce_own_share(const Chunks& chunks, size_t chunk, const Reduction& reduction);
  void fetch_results(const Chunks& chunks, size_t chunk);

  void reduce_awaited(Span own, size_t lane, size_t begin, const Reduction& reduction);

  const std::shared_ptr<Group> group_;
  Exchange exchange_;
  std::vector<const void*> sources_;  // of the reduction under way, by rank
};

}  // namespace minddp::shm
