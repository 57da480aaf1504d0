// The collectives, as programs of ticks (exchange.h).
//
// Tensors lie in private memory in general, so their data pass through the slots in pieces that stay
// in the cache: one more copy, but no more traffic to memory. An allreduce whose tensors lie in the
// shared heap on all ranks works on them in place.
//
// What always holds
//   - All ranks get the same bits from a reduction: each element is combined once, or by everyone
//     in the order of ranks.
//   - A rank writes its own tensors only. One that gives up in the middle has its memory to itself from
//     the moment it raises: no peer changes it, and a peer that may have read what was written there
//     afterwards raises as well.
//   - Whatever throws inside a collective breaks the group, on this rank and on all others.
// Threads: as exchange.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "exchange.h"
#include "wire/reduce.h"

namespace minddp::shm {

// A piece of private memory.
struct Span {
  char* data;
  size_t bytes;
};

// What one collective works on besides the ranks' data.
struct Call {
  at::ScalarType dtype;
  std::chrono::milliseconds timeout;
};

struct Reduction {
  c10d::ReduceOp::RedOpType op;
  ReduceFunction function;
  size_t element_bytes;
};

class Collectives {
 public:
  explicit Collectives(std::shared_ptr<Group> group)
      : group_(std::move(group)), exchange_(*group_), sources_(static_cast<size_t>(group_->size())) {}

  void barrier(const Call& call);
  void broadcast(Span data, int root, const Call& call);
  void allreduce(Span data, const Reduction& reduction, const Call& call);
  // The result appears on the root; the others' data stay.
  void reduce(Span data, int root, const Reduction& reduction, const Call& call);
  // outputs[r] receives rank r's input; their sizes may differ, and are the same list on all ranks.
  void allgather(Span input, const std::vector<Span>& outputs, const Call& call);
  // outputs: one per rank on the root, empty elsewhere.
  void gather(Span input, const std::vector<Span>& outputs, int root, const Call& call);
  // inputs: one per rank on the root, empty elsewhere.
  void scatter(Span output, const std::vector<Span>& inputs, int root, const Call& call);
  // inputs[r] is this rank's share of rank r's output.
  void reduce_scatter(Span output, const std::vector<Span>& inputs, const Reduction& reduction, const Call& call);
  // inputs[r] goes to rank r, outputs[r] comes from there; sizes may differ by pair.
  void alltoall(const std::vector<Span>& outputs, const std::vector<Span>& inputs, const Call& call);

  uint64_t sequence() const { return exchange_.sequence(); }

 private:
  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }

  void run(const Signature& signature, const Call& call, const std::function<void()>& program);
  void synchronize(int64_t note = 0);
  void show_call(size_t begin);
  const char* await_root(int root, size_t begin);

  void allreduce_flat(Span data, const Reduction& reduction);

  // How an allreduce cuts its data: chunks, of which each rank owns a share of so many bytes.
  struct Chunks {
    Chunks(Span data, size_t ranks, size_t share_bytes);
    Span share(size_t chunk, int owner) const;  // shorter, or empty, in the last chunk

    Span data;
    size_t ranks;
    size_t share_bytes;
    size_t count;
  };
  void allreduce_sharded(Span data, const Reduction& reduction);
  void hand_in(const Chunks& chunks, size_t chunk);
  void reduce_own_share(const Chunks& chunks, size_t chunk, const Reduction& reduction);
  void fetch_results(const Chunks& chunks, size_t chunk);

  using Tensors = std::vector<const char*>;  // by rank
  bool all_shared(Span data, Tensors& tensors);
  void allreduce_direct(Span data, const Tensors& tensors, const Reduction& reduction);
  void reduce_own_share_of(Span share, size_t begin, const Tensors& tensors, const Reduction& reduction);

  void receive_gathered(const std::vector<Span>& outputs, size_t begin, size_t piece);

  // A slot with data for each peer is cut into lanes of equal size, one for each peer.
  static size_t lane_index(int writer, int reader);
  size_t lane_bytes() const;
  void write_lanes(const std::vector<Span>& inputs, size_t begin);
  void reduce_awaited(Span output, const char* own, size_t lane, size_t begin, const Reduction& reduction);
  void write_measured_lanes(const std::vector<Span>& inputs, size_t begin);
  void read_measured_lanes(const std::vector<Span>& outputs, size_t begin);

  const std::shared_ptr<Group> group_;
  Exchange exchange_;
  std::vector<const void*> sources_;  // of the reduction under way, by rank
};

}  // namespace minddp::shm
