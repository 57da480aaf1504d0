#include "collectives.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "copy.h"

namespace minddp::shm {
namespace {

// Up to here every rank reads all others' whole data and reduces them itself: more work, but one
// wait instead of two.
constexpr size_t kFlatBytes = size_t{16} << 10;

// The piece of an allreduce that one rank reduces between two waits.
constexpr size_t kShareBytes = size_t{64} << 10;
constexpr size_t kMinimumShare = size_t{16} << 10;
// So that a rank can work on one while its peers do on another.
constexpr size_t kChunksAtLeast = 4;

// The same where the tensors themselves are read: as much as the caches keep until it is fetched, since
// every wait may cost a thread switch.
constexpr size_t kDirectShareBytes = size_t{2} << 20;

// What is reduced before the result is copied on: stays in the first-level cache.
constexpr size_t kBlockBytes = size_t{8} << 10;

constexpr size_t kMinimumPiece = size_t{32} << 10;

size_t ceil_div(size_t value, size_t unit) { return (value + unit - 1) / unit; }

// Pieces for a message: small enough that the reader begins while the writer goes on.
size_t piece_bytes(size_t total, size_t limit) {
  const size_t piece = std::max(round_up(ceil_div(total, 8), kCacheLine), kMinimumPiece);
  return std::min(piece, limit);
}

// The part of `span` that lies in [begin, begin + bytes).
Span clip(Span span, size_t begin, size_t bytes) {
  const size_t first = std::min(begin, span.bytes);
  return {span.data + first, std::min(bytes, span.bytes - first)};
}

// The reader stays one tick behind the writer, so that a rank's writing hides its peers' delay.
template <class Write, class Read>
void pipeline(size_t ticks, Write write, Read read) {
  for (size_t tick = 0; tick <= ticks; ++tick) {
    if (tick < ticks) write(tick);
    if (tick > 0) read(tick - 1);
  }
}

size_t total_bytes(const std::vector<Span>& spans) {
  size_t total = 0;
  for (const Span& span : spans) total += span.bytes;
  return total;
}

size_t largest(const std::vector<Span>& spans) {
  size_t bytes = 0;
  for (const Span& span : spans) bytes = std::max(bytes, span.bytes);
  return bytes;
}

Signature signature(Kind kind, const Call& call, size_t bytes, int root = -1) {
  return {.kind = kind, .dtype = call.dtype, .root = root, .bytes = bytes};
}

Signature signature(Kind kind, const Call& call, size_t bytes, const Reduction& reduction, int root = -1) {
  return {.kind = kind, .dtype = call.dtype, .reduce_op = reduction.op, .root = root, .bytes = bytes};
}

}  // namespace

void Collectives::run(const Signature& signature, const Call& call, const std::function<void()>& program) {
  exchange_.begin(signature, call.timeout);
  try {
    program();
  } catch (...) {
    exchange_.fail_current();
  }
}

// Everyone has arrived; the note is seen by all.
void Collectives::synchronize(int64_t note) {
  exchange_.acquire();
  exchange_.post(note);
  exchange_.await_all();
}

void Collectives::barrier(const Call& call) {
  run({.kind = Kind::kBarrier}, call, [&] {
    synchronize();
    exchange_.take();
  });
}

// A tick of a collective with a root, for a rank without data: in the first one it is there, too.
void Collectives::show_call(size_t begin) {
  if (begin == 0) {
    exchange_.acquire();
    exchange_.post();
  } else {
    exchange_.skip();
  }
}

// What the root has in this tick; in a collective's first one, everyone's call is looked at.
const char* Collectives::await_root(int root, size_t begin) {
  if (begin == 0) exchange_.await_all();
  return rank() == root ? nullptr : exchange_.await(root);
}

void Collectives::broadcast(Span data, int root, const Call& call) {
  if (size() == 1) return;
  const size_t piece = piece_bytes(data.bytes, Exchange::kSlotBytes);
  run(signature(Kind::kBroadcast, call, data.bytes, root), call, [&] {
    for (size_t begin = 0; begin == 0 || begin < data.bytes; begin += piece) {
      const Span part = clip(data, begin, piece);
      if (rank() == root) {
        copy_to_peer(exchange_.acquire(), part.data, part.bytes);
        exchange_.post();
      } else {
        show_call(begin);
      }
      const char* sent = await_root(root, begin);
      if (rank() != root) copy(part.data, sent, part.bytes);
      exchange_.take();
    }
  });
}

// --- allreduce ---

void Collectives::allreduce(Span data, const Reduction& reduction, const Call& call) {
  if (size() == 1) return;
  run(signature(Kind::kAllreduce, call, data.bytes, reduction), call, [&] {
    Tensors tensors;
    if (data.bytes <= kFlatBytes)
      allreduce_flat(data, reduction);
    else if (all_shared(data, tensors))
      allreduce_direct(data, tensors, reduction);
    else
      allreduce_sharded(data, reduction);
  });
}

void Collectives::allreduce_flat(Span data, const Reduction& reduction) {
  copy_to_peer(exchange_.acquire(), data.data, data.bytes);
  exchange_.post();
  exchange_.await_all();
  reduce_awaited(data, data.data, 0, 0, reduction);
  exchange_.take();
}

// output = the reduction of `own` and what each peer has for it in the slot being read: `begin` bytes into
// its lane for this rank, if lanes are `lane` bytes wide, or into the slot, if `lane` is 0.
// REQUIRES: the slots are awaited
void Collectives::reduce_awaited(
    Span output, const char* own, size_t lane, size_t begin, const Reduction& reduction) {
  for (int peer = 0; peer < size(); ++peer)
    sources_[static_cast<size_t>(peer)] =
        peer == rank() ? own : exchange_.data(peer) + lane_index(peer, rank()) * lane + begin;
  reduction.function(
      output.data, sources_.data(), size(), static_cast<int64_t>(output.bytes / reduction.element_bytes));
}

// The data are cut into chunks, and each chunk into one share per rank. A rank hands the others' shares
// of its chunk out, reduces its own share, and hands the result out: ticks "in" and "out" of a chunk.
// Chunk c+1 goes in before chunk c is reduced, and chunk c is fetched after chunk c+1 is reduced, so a
// rank waits only for a peer that is a whole chunk behind.
//
// With n ranks and M bytes, a rank moves 2M through its own tensor, as in the direct version, and
// 2M (n-1)/n into slots and as much out of them: for two ranks twice what the bound of the direct version
// is, since memory that is not shared must be copied by its owner, out and in.
void Collectives::allreduce_sharded(Span data, const Reduction& reduction) {
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

Collectives::Chunks::Chunks(Span data, size_t ranks, size_t share_bytes)
    : data(data), ranks(ranks), share_bytes(share_bytes), count(ceil_div(data.bytes, share_bytes * ranks)) {}

Span Collectives::Chunks::share(size_t chunk, int owner) const {
  const size_t begin = chunk * share_bytes * ranks;
  const size_t end = std::min(begin + share_bytes * ranks, data.bytes);
  const size_t share = round_up(ceil_div(end - begin, ranks), kCacheLine);
  return clip({data.data, end}, begin + share * static_cast<size_t>(owner), share);
}

void Collectives::hand_in(const Chunks& chunks, size_t chunk) {
  char* slot = exchange_.acquire();
  for (int owner = 0; owner < size(); ++owner)
    if (owner != rank()) {
      const Span share = chunks.share(chunk, owner);
      copy_to_peer(slot + lane_index(rank(), owner) * chunks.share_bytes, share.data, share.bytes);
    }
  exchange_.post();
}

void Collectives::reduce_own_share(const Chunks& chunks, size_t chunk, const Reduction& reduction) {
  char* slot = exchange_.acquire();
  exchange_.await_all();
  const Span own = chunks.share(chunk, rank());
  for (size_t begin = 0; begin < own.bytes; begin += kBlockBytes) {
    const Span block = clip(own, begin, kBlockBytes);
    reduce_awaited(block, block.data, chunks.share_bytes, begin, reduction);
    copy_to_peer(slot + begin, block.data, block.bytes);
  }
  exchange_.post();
  exchange_.take();
}

void Collectives::fetch_results(const Chunks& chunks, size_t chunk) {
  for (int owner = 0; owner < size(); ++owner)
    if (owner != rank()) {
      const Span share = chunks.share(chunk, owner);
      copy(share.data, exchange_.await(owner), share.bytes);
    }
  exchange_.take();
}

// Exchanges where the ranks' tensors lie; the tensors by rank when all are in shared memory. Everyone
// has arrived when this returns.
bool Collectives::all_shared(Span data, Tensors& tensors) {
  const int64_t own = group_->offset_of(data.data, data.bytes);
  synchronize(own);
  bool shared = true;
  for (int peer = 0; peer < size(); ++peer) {
    const int64_t offset = peer == rank() ? own : exchange_.note(peer);
    shared = shared && offset >= 0;
    tensors.push_back(shared ? group_->at(peer, offset, data.bytes) : nullptr);
  }
  exchange_.take();
  return shared;
}

// In each chunk a rank reduces its share straight out of all ranks' tensors, into its own tensor, and
// then fetches the others' shares of the chunk before, which the caches still hold. Fetching costs a rank
// M (n-1)/n more than if it wrote its share into all tensors itself; but then one that comes late would
// write into the tensor of another that has given up.
//
// The bound: with n ranks and M bytes, a rank reads M/n from each of n tensors and writes M to its own,
// 2M bytes in all; both at the bandwidth that all ranks reach at once, no allreduce on shared buffers can
// be faster than a copy of M bytes that all ranks make at once.
void Collectives::allreduce_direct(Span data, const Tensors& tensors, const Reduction& reduction) {
  const size_t ranks = static_cast<size_t>(size());
  const size_t whole = round_up(ceil_div(data.bytes, ranks), kCacheLine);
  const Chunks chunks(data, ranks, std::min(whole, kDirectShareBytes));
  const auto fetch = chunks.count > 1 ? stream_copy : copy;
  for (size_t step = 0; step <= chunks.count; ++step) {
    if (step < chunks.count) {
      exchange_.acquire();
      const Span own = chunks.share(step, rank());
      reduce_own_share_of(own, static_cast<size_t>(own.data - data.data), tensors, reduction);
      group_->check_all_active();
      exchange_.post();
    }
    if (step == 0) continue;
    for (int owner = 0; owner < size(); ++owner) {
      if (owner == rank()) continue;
      const Span share = chunks.share(step - 1, owner);
      exchange_.await(owner);
      fetch(share.data, tensors[static_cast<size_t>(owner)] + (share.data - data.data), share.bytes);
    }
    exchange_.take();
  }
  // Nobody returns, and changes its tensor, before all have read it.
  group_->check_all_active();
  synchronize();
  exchange_.take();
}

// Reduces in place what lies `begin` bytes into the tensors.
void Collectives::reduce_own_share_of(Span share, size_t begin, const Tensors& tensors, const Reduction& reduction) {
  for (size_t done = 0; done < share.bytes; done += kBlockBytes) {
    const Span block = clip(share, done, kBlockBytes);
    for (size_t peer = 0; peer < tensors.size(); ++peer) sources_[peer] = tensors[peer] + begin + done;
    reduction.function(
        block.data, sources_.data(), size(), static_cast<int64_t>(block.bytes / reduction.element_bytes));
  }
}

// --- one root, many receivers, and the reverse ---

void Collectives::reduce(Span data, int root, const Reduction& reduction, const Call& call) {
  if (size() == 1) return;
  const size_t piece = piece_bytes(data.bytes, Exchange::kSlotBytes);
  run(signature(Kind::kReduce, call, data.bytes, reduction, root), call, [&] {
    for (size_t begin = 0; begin == 0 || begin < data.bytes; begin += piece) {
      const Span part = clip(data, begin, piece);
      if (rank() == root) {
        show_call(begin);
        exchange_.await_all();
        reduce_awaited(part, part.data, 0, 0, reduction);
      } else {
        copy_to_peer(exchange_.acquire(), part.data, part.bytes);
        exchange_.post();
        if (begin == 0) exchange_.await_all();
      }
      exchange_.take();
    }
  });
}

void Collectives::allgather(Span input, const std::vector<Span>& outputs, const Call& call) {
  copy(outputs[static_cast<size_t>(rank())].data, input.data, input.bytes);
  if (size() == 1) return;
  const size_t piece = piece_bytes(largest(outputs), Exchange::kSlotBytes);
  run(signature(Kind::kAllgather, call, total_bytes(outputs)), call, [&] {
    pipeline(
        std::max(ceil_div(largest(outputs), piece), size_t{1}),
        [&](size_t tick) {
          const Span part = clip(input, tick * piece, piece);
          copy_to_peer(exchange_.acquire(), part.data, part.bytes);
          exchange_.post(static_cast<int64_t>(input.bytes));
        },
        [&](size_t tick) { receive_gathered(outputs, tick * piece, piece); });
  });
}

void Collectives::receive_gathered(const std::vector<Span>& outputs, size_t begin, size_t piece) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const Span& output = outputs[static_cast<size_t>(peer)];
    const Span part = clip(output, begin, piece);
    const char* slot = exchange_.await(peer);
    if (exchange_.note(peer) != static_cast<int64_t>(output.bytes)) {
      throw std::runtime_error(c10::str("rank ", peer, " gives ", exchange_.note(peer),
          " bytes, but the output for it on rank ", rank(), " has ", output.bytes));
    }
    copy(part.data, slot, part.bytes);
  }
  exchange_.take();
}

void Collectives::gather(Span input, const std::vector<Span>& outputs, int root, const Call& call) {
  if (rank() == root) copy(outputs[static_cast<size_t>(root)].data, input.data, input.bytes);
  if (size() == 1) return;
  const size_t piece = piece_bytes(input.bytes, Exchange::kSlotBytes);
  run(signature(Kind::kGather, call, input.bytes, root), call, [&] {
    for (size_t begin = 0; begin == 0 || begin < input.bytes; begin += piece) {
      if (rank() == root) {
        show_call(begin);
        receive_gathered(outputs, begin, piece);
      } else {
        const Span part = clip(input, begin, piece);
        copy_to_peer(exchange_.acquire(), part.data, part.bytes);
        exchange_.post(static_cast<int64_t>(input.bytes));
        if (begin == 0) exchange_.await_all();
        exchange_.take();
      }
    }
  });
}

// --- every pair of ranks has data of its own: a slot holds one lane for each peer ---

size_t Collectives::lane_index(int writer, int reader) {
  return static_cast<size_t>(reader < writer ? reader : reader - 1);
}

size_t Collectives::lane_bytes() const {
  return Exchange::kSlotBytes / static_cast<size_t>(size() - 1) / kCacheLine * kCacheLine;
}

void Collectives::write_lanes(const std::vector<Span>& inputs, size_t begin) {
  char* slot = exchange_.acquire();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      const Span part = clip(inputs[static_cast<size_t>(peer)], begin, lane_bytes());
      copy_to_peer(slot + lane_index(rank(), peer) * lane_bytes(), part.data, part.bytes);
    }
  }
  exchange_.post();
}

void Collectives::scatter(Span output, const std::vector<Span>& inputs, int root, const Call& call) {
  if (rank() == root) copy(output.data, inputs[static_cast<size_t>(root)].data, output.bytes);
  if (size() == 1) return;
  run(signature(Kind::kScatter, call, output.bytes, root), call, [&] {
    for (size_t begin = 0; begin == 0 || begin < output.bytes; begin += lane_bytes()) {
      if (rank() == root)
        write_lanes(inputs, begin);
      else
        show_call(begin);
      const char* sent = await_root(root, begin);
      const Span part = clip(output, begin, lane_bytes());
      if (rank() != root) copy(part.data, sent + lane_index(root, rank()) * lane_bytes(), part.bytes);
      exchange_.take();
    }
  });
}

void Collectives::reduce_scatter(
    Span output, const std::vector<Span>& inputs, const Reduction& reduction, const Call& call) {
  const Span own = inputs[static_cast<size_t>(rank())];
  if (size() == 1) {
    copy(output.data, own.data, own.bytes);
    return;
  }
  run(signature(Kind::kReduceScatter, call, output.bytes, reduction), call, [&] {
    pipeline(
        std::max(ceil_div(output.bytes, lane_bytes()), size_t{1}),
        [&](size_t tick) { write_lanes(inputs, tick * lane_bytes()); },
        [&](size_t tick) {
          const size_t begin = tick * lane_bytes();
          exchange_.await_all();
          reduce_awaited(clip(output, begin, lane_bytes()), own.data + begin, lane_bytes(), 0, reduction);
          exchange_.take();
        });
  });
}

// A rank cannot know how much two others send each other, so the first tick always happens, and its
// notes say how many there are. Each lane begins with the size of the whole message, so that sender and
// receiver can compare what they expect.
void Collectives::alltoall(const std::vector<Span>& outputs, const std::vector<Span>& inputs, const Call& call) {
  const Span& input = inputs[static_cast<size_t>(rank())];
  const Span& output = outputs[static_cast<size_t>(rank())];
  const auto keep_own = [&] {
    if (input.bytes != output.bytes)
      throw std::runtime_error(c10::str("rank ", rank(), " sends ", input.bytes, " bytes to itself, and expects ",
          output.bytes, ": its input splits and its output splits there differ"));
    copy(output.data, input.data, input.bytes);
  };
  if (size() == 1) return keep_own();
  run(signature(Kind::kAlltoall, call, 0), call, [&] {
    keep_own();
    const size_t room = lane_bytes() - kCacheLine;
    size_t longest = largest(inputs);
    write_measured_lanes(inputs, 0);
    exchange_.await_all();
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank()) longest = std::max(longest, static_cast<size_t>(exchange_.note(peer)));
    read_measured_lanes(outputs, 0);
    for (size_t begin = room; begin < longest; begin += room) {
      write_measured_lanes(inputs, begin);
      read_measured_lanes(outputs, begin);
    }
  });
}

void Collectives::write_measured_lanes(const std::vector<Span>& inputs, size_t begin) {
  char* slot = exchange_.acquire();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      const Span& input = inputs[static_cast<size_t>(peer)];
      char* lane = slot + lane_index(rank(), peer) * lane_bytes();
      const Span part = clip(input, begin, lane_bytes() - kCacheLine);
      std::memcpy(lane, &input.bytes, sizeof(input.bytes));
      copy_to_peer(lane + kCacheLine, part.data, part.bytes);
    }
  }
  exchange_.post(static_cast<int64_t>(largest(inputs)));
}

void Collectives::read_measured_lanes(const std::vector<Span>& outputs, size_t begin) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const Span& output = outputs[static_cast<size_t>(peer)];
    const char* lane = exchange_.await(peer) + lane_index(peer, rank()) * lane_bytes();
    size_t sent;
    std::memcpy(&sent, lane, sizeof(sent));
    if (sent != output.bytes) {
      throw std::runtime_error(c10::str("rank ", peer, " sends ", sent, " bytes to rank ", rank(), ", which expects ",
          output.bytes, " from it: the input splits there and the output splits here differ"));
    }
    const Span part = clip(output, begin, lane_bytes() - kCacheLine);
    copy(part.data, lane + kCacheLine, part.bytes);
  }
  exchange_.take();
}

}  // namespace minddp::shm
