#include "allreduce.h"

#include <algorithm>

#include "copy.h"

namespace minddp::shm {
namespace {

// Up to here every rank reads all others' whole data and reduces them itself: more work, but one
// wait instead of two.
constexpr size_t kFlatBytes = size_t{16} << 10;

// The piece that one rank reduces between two waits.
constexpr size_t kShareBytes = size_t{64} << 10;
constexpr size_t kMinimumShare = size_t{16} << 10;
// So that a rank can work on one while its peers do on another.
constexpr size_t kChunksAtLeast = 4;

// What is reduced before the result is copied on: stays in the first-level cache.
constexpr size_t kBlockBytes = size_t{8} << 10;

size_t ceil_div(size_t value, size_t unit) { return (value + unit - 1) / unit; }

// The part of `span` that lies in [begin, begin + bytes).
Span clip(Span span, size_t begin, size_t bytes) {
  const size_t first = std::min(begin, span.bytes);
  return {span.data + first, std::min(bytes, span.bytes - first)};
}

// A slot with data for each peer is cut into lanes of equal size, one for each peer.
size_t lane_index(int writer, int reader) { return static_cast<size_t>(reader < writer ? reader : reader - 1); }

}  // namespace

void Allreduce::run(
    const Signature& signature, std::chrono::milliseconds timeout, const std::function<void()>& program) {
  if (size() == 1) return;
  exchange_.begin(signature, timeout);
  try {
    program();
  } catch (...) {
    exchange_.fail_current();
  }
}

void Allreduce::barrier(std::chrono::milliseconds timeout) {
  run({}, timeout, [this] {
    exchange_.acquire();
    exchange_.post();
    exchange_.await_all();
    exchange_.take();
  });
}

void Allreduce::run(Span data, const Reduction& reduction, std::chrono::milliseconds timeout) {
  run({reduction.dtype, reduction.op, data.bytes}, timeout,
      [&] { data.bytes <= kFlatBytes ? run_flat(data, reduction) : run_sharded(data, reduction); });
}

void Allreduce::run_flat(Span data, const Reduction& reduction) {
  copy_to_peer(exchange_.acquire(), data.data, data.bytes);
  exchange_.post();
  exchange_.await_all();
  reduce_awaited(data, 0, 0, reduction);
  exchange_.take();
}

// own = the reduction of `own` and what each peer has for it in the slot being read: `begin` bytes into
// its lane for this rank, if lanes are `lane` bytes wide, or into the slot, if `lane` is 0.
// REQUIRES: the slots are awaited
void Allreduce::reduce_awaited(Span own, size_t lane, size_t begin, const Reduction& reduction) {
  for (int peer = 0; peer < size(); ++peer)
    sources_[static_cast<size_t>(peer)] =
        peer == rank() ? own.data : exchange_.data(peer) + lane_index(peer, rank()) * lane + begin;
  reduction.function(
      own.data, sources_.data(), size(), static_cast<int64_t>(own.bytes / c10::elementSize(reduction.dtype)));
}

// The data are cut into chunks, and each chunk into one share per rank. A rank hands the others' shares
// of its chunk out, reduces its own share, and hands the result out: ticks "in" and "out" of a chunk.
// Chunk c+1 goes in before chunk c is reduced, and chunk c is fetched after chunk c+1 is reduced, so a
// rank waits only for a peer that is a whole chunk behind.
//
// With n ranks and M bytes, a rank moves 2M through its own tensor, and 2M (n-1)/n into slots and as much
// out of them: memory that is not shared must be copied by its owner, out and in.
void Allreduce::run_sharded(Span data, const Reduction& reduction) {
  const size_t ranks = static_cast<size_t>(size());
  const size_t fine = std::max(round_up(ceil_div(data.bytes, kChunksAtLeast * ranks), kCacheLine), kMinimumShare);
  const size_t room = Exchange::kSlotBytes / (ranks - 1) / kCacheLine * kCacheLine;
  const Chunks chunks(data, ranks, std::min({fine, room, kShareBytes}));
  for (size_t step = 0; step < chunks.count + 2; ++step) {
    if (step < chunks.count) hand_in(chunks, step);
    if (step >= 1 && step <= chunks.count) reduce_own_share(chunks, step - 1, reduction);
    if (step >= 2) fetch_results(chunks, step - 2);
  }
}

Allreduce::Chunks::Chunks(Span data, size_t ranks, size_t share_bytes)
    : data(data), ranks(ranks), share_bytes(share_bytes), count(ceil_div(data.bytes, share_bytes * ranks)) {}

Span Allreduce::Chunks::share(size_t chunk, int owner) const {
  const size_t begin = chunk * share_bytes * ranks;
  const size_t end = std::min(begin + share_bytes * ranks, data.bytes);
  const size_t share = round_up(ceil_div(end - begin, ranks), kCacheLine);
  return clip({data.data, end}, begin + share * static_cast<size_t>(owner), share);
}

void Allreduce::hand_in(const Chunks& chunks, size_t chunk) {
  char* slot = exchange_.acquire();
  for (int owner = 0; owner < size(); ++owner)
    if (owner != rank()) {
      const Span share = chunks.share(chunk, owner);
      copy_to_peer(slot + lane_index(rank(), owner) * chunks.share_bytes, share.data, share.bytes);
    }
  exchange_.post();
}

void Allreduce::reduce_own_share(const Chunks& chunks, size_t chunk, const Reduction& reduction) {
  char* slot = exchange_.acquire();
  exchange_.await_all();
  const Span own = chunks.share(chunk, rank());
  for (size_t begin = 0; begin < own.bytes; begin += kBlockBytes) {
    const Span block = clip(own, begin, kBlockBytes);
    reduce_awaited(block, chunks.share_bytes, begin, reduction);
    copy_to_peer(slot + begin, block.data, block.bytes);
  }
  exchange_.post();
  exchange_.take();
}

void Allreduce::fetch_results(const Chunks& chunks, size_t chunk) {
  for (int owner = 0; owner < size(); ++owner)
    if (owner != rank()) {
      const Span share = chunks.share(chunk, owner);
      copy(share.data, exchange_.await(owner), share.bytes);
    }
  exchange_.take();
}

}  // namespace minddp::shm
