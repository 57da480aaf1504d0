#include "exchange.h"

#include <c10/util/Exception.h>

#include <stdexcept>

namespace minddp::shm {
namespace {

const char* const kReductionNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};

}  // namespace

std::string Signature::describe() const {
  if (dtype == at::ScalarType::Undefined) return "barrier()";
  const char* name = reduce_op < std::size(kReductionNames) ? kReductionNames[reduce_op] : "?";
  return c10::str("allreduce(", name, ", ", c10::toString(dtype), ", ", bytes, " bytes)");
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

void Exchange::post() {
  own_header(write_tick_) = Header{sequence_, signature_};
  group_.control(rank()).posted.store(++write_tick_);
}

const char* Exchange::await(int peer) {
  group_.await(group_.control(peer).posted, read_tick_ + 1, peer, deadline_);
  check(peer, header(peer, read_tick_));
  return data(peer);
}

const char* Exchange::data(int peer) { return reinterpret_cast<const char*>(&header(peer, read_tick_) + 1); }

void Exchange::await_all() {
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) await(peer);
}

void Exchange::take() { group_.control(rank()).taken.store(++read_tick_); }

void Exchange::check(int peer, const Header& theirs) const {
  if (theirs.sequence == sequence_ && theirs.signature == signature_) return;
  throw std::runtime_error(c10::str("rank ", peer, " runs another collective: ", theirs.signature.describe(),
      " as number ", theirs.sequence,
      ". All ranks must call the same collectives, with the same sizes and dtypes, in the same order"));
}

void Exchange::fail_current() {
  try {
    throw;
  } catch (const std::exception& error) {
    broken_ = c10::str(
        "rank ", rank(), ", ", signature_.describe(), " as number ", sequence_, " of this group: ", error.what());
  }
  group_.fail(broken_);
  C10_THROW_ERROR(DistBackendError, "shm: " + broken_);
}

}  // namespace minddp::shm
