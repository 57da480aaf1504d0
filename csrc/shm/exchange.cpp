#include "exchange.h"

#include <c10/util/Exception.h>

#include <stdexcept>

namespace minddp::shm {
namespace {

const char* const kKindNames[] = {
    "?",
    "barrier",
    "broadcast",
    "allreduce",
    "reduce",
    "allgather",
    "gather",
    "scatter",
    "reduce_scatter",
    "alltoall",
};

const char* const kReductionNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};

}  // namespace

std::string Signature::describe() const {
  std::string arguments;
  const auto add = [&](const std::string& argument) { arguments += (arguments.empty() ? "" : ", ") + argument; };
  if (reduce_op < std::size(kReductionNames)) add(kReductionNames[reduce_op]);
  if (root >= 0) add("root " + std::to_string(root));
  if (dtype != at::ScalarType::Undefined) add(c10::toString(dtype));
  if (bytes > 0) add(std::to_string(bytes) + " bytes");
  return std::string(kKindNames[static_cast<size_t>(kind)]) + "(" + arguments + ")";
}

const Exchange::Header& Exchange::header(int rank, uint32_t tick) {
  return *reinterpret_cast<const Header*>(group_.slots(rank) + (tick % kSlots) * kStride);
}

Exchange::Header& Exchange::own_header(uint32_t tick) {
  return *reinterpret_cast<Header*>(group_.own_slots() + (tick % kSlots) * kStride);
}

void Exchange::begin(const Signature& signature, std::chrono::milliseconds timeout) {
  if (!broken_.empty()) {
    C10_THROW_ERROR(
        DistBackendError, "shm: this process group is broken since an earlier failure, make a new one: " + broken_);
  }
  ++sequence_;
  signature_ = signature;
  deadline_ = Deadline(timeout);
}

char* Exchange::acquire() {
  // The slot's last use was kSlots ticks ago. At the start the counters lie before it, as they should.
  const uint32_t last_use_taken = write_tick_ - kSlots + 1;
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) group_.await(group_.control(peer).taken, last_use_taken, peer, deadline_);
  return reinterpret_cast<char*>(&own_header(write_tick_) + 1);
}

void Exchange::post(int64_t note) {
  own_header(write_tick_) = Header{write_tick_, sequence_, signature_, note};
  skip();
}

void Exchange::skip() { group_.control(rank()).posted.store(++write_tick_); }

const char* Exchange::await(int peer) {
  group_.await(group_.control(peer).posted, read_tick_ + 1, peer, deadline_);
  check(peer, header(peer, read_tick_));
  return data(peer);
}

const char* Exchange::data(int peer) { return reinterpret_cast<const char*>(&header(peer, read_tick_) + 1); }

int64_t Exchange::note(int peer) { return header(peer, read_tick_).note; }

void Exchange::await_all() {
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) await(peer);
}

void Exchange::take() { group_.control(rank()).taken.store(++read_tick_); }

void Exchange::check(int peer, const Header& theirs) const {
  if (theirs.tick == read_tick_ && theirs.sequence == sequence_ && theirs.signature == signature_) return;
  // A slot of another tick: the peer let this tick pass, as a rank does that only receives.
  const std::string call = theirs.tick == read_tick_
      ? theirs.signature.describe() + " as number " + std::to_string(theirs.sequence)
      : "one in which it sends nothing here";
  throw std::runtime_error(c10::str("rank ", peer, " runs another collective: ", call,
      ". All ranks must call the same collectives, with the same sizes and dtypes, in the same order"));
}

std::string Exchange::describe() const {
  return c10::str("rank ", group_.rank(), ", ", signature_.describe(), " as number ", sequence_, " of this group");
}

void Exchange::fail_current() {
  try {
    throw;
  } catch (const std::exception& error) {
    broken_ = describe() + ": " + error.what();
  }
  group_.fail(broken_);
  C10_THROW_ERROR(DistBackendError, "shm: " + broken_);
}

}  // namespace minddp::shm
