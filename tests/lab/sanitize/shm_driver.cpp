// Random operations of the shm transport, checked, with each rank a thread of one process: so a sanitizer
// sees what all ranks do to the memory that they share.
//
//   shm_driver RANKS OPERATIONS SEED
//
// All ranks draw the same operations from the same seed. What a rank contributes is a function of (operation,
// rank, element), so each knows what must come out. Now and then the group ends and another begins on the
// same store; some of these are ended by ranks that make different calls.
//
// Each rank maps each peer's segment: one file at many addresses, which a sanitizer would take for as many
// memories. one_mapping.cpp gives it one.
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shm/collectives.h"
#include "shm/group.h"
#include "shm/mailbox.h"
#include "shm/messenger.h"
#include "shm/owner.h"

namespace {

using namespace minddp::shm;
using c10d::ReduceOp;
using minddp::reduce_function;
using std::chrono::milliseconds;

constexpr milliseconds kTimeout{120'000};  // a sanitizer slows all down, and the machine may be busy
constexpr uint64_t kOperationsOfAGroup = 2'000;

// Memory for int64 or float elements, in the shared heap or not.
class Buffer {
 public:
  Buffer(SharedHeap& heap, bool shared, bool wide, size_t elements)
      : heap_(heap), wide_(wide), bytes_(elements * (wide ? 8 : 4)) {
    if (shared)
      shared_ = heap.allocate(std::max<size_t>(bytes_, 1));
    else
      own_.resize(bytes_);
    if (bytes_ > 0) std::memset(data(), 0xAB, bytes_);
  }
  Buffer(Buffer&& other) noexcept
      : heap_(other.heap_), wide_(other.wide_), bytes_(other.bytes_), own_(std::move(other.own_)),
        shared_(std::exchange(other.shared_, nullptr)) {}
  ~Buffer() {
    if (shared_ != nullptr) heap_.free(shared_);
  }

  char* data() { return shared_ != nullptr ? shared_ : own_.data(); }
  Span span() { return {data(), bytes_}; }
  size_t elements() const { return bytes_ / (wide_ ? 8 : 4); }
  int64_t get(size_t i) { return wide_ ? element<int64_t>(i) : static_cast<int64_t>(element<float>(i)); }
  void set(size_t i, int64_t value) {
    if (wide_)
      put<int64_t>(i, value);
    else
      put<float>(i, static_cast<float>(value));
  }

 private:
  template <class T>
  T element(size_t i) {
    T value;
    std::memcpy(&value, data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void put(size_t i, T value) {
    std::memcpy(data() + i * sizeof(T), &value, sizeof(T));
  }

  SharedHeap& heap_;
  bool wide_;
  size_t bytes_;
  std::vector<char> own_;
  char* shared_ = nullptr;
};

// Small whole numbers: every order of adding them gives the same.
int64_t value(uint64_t operation, int rank, size_t i) {
  return static_cast<int64_t>((operation * 13 + static_cast<uint64_t>(rank) * 7 + i * 3) % 11);
}

struct Pending {
  void end(std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(mutex);
    --left;
    if (error && !first) first = error;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return left == 0; });
    if (first) std::rethrow_exception(first);
  }

  std::mutex mutex;
  std::condition_variable changed;
  size_t left = 0;           // GUARDED_BY(mutex)
  std::exception_ptr first;  // GUARDED_BY(mutex)
};

// One rank's part of one group's life.
class Rank {
 public:
  Rank(const std::shared_ptr<Group>& group, uint64_t seed)
      : group_(group), collectives_(make_owned<Collectives>(group)), messenger_(make_owned<Messenger>(group)),
        random_(seed) {}
  ~Rank() { messenger_->stop(milliseconds(5'000)); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void operate(uint64_t operation) {
    operation_ = operation;
    wide_ = draw(2) != 0;
    const size_t elements = draw_elements();
    const int root = static_cast<int>(draw(static_cast<uint64_t>(size())));
    switch (draw(10)) {
      case 0: collectives_->barrier(call()); break;
      case 1: broadcast(elements, root); break;
      case 2: allreduce(elements, false); break;
      case 3: allreduce(elements, true); break;
      case 4: reduce(elements, root); break;
      case 5: allgather(elements, root); break;
      case 6: root_to_all(elements, root); break;
      case 7: reduce_scatter(elements); break;
      case 8: alltoall(elements); break;
      case 9: messages(elements, root); break;
    }
  }

  // Ranks make different calls: all of them raise.
  void disagree() {
    Buffer buffer(group_->heap(), false, true, 16);
    try {
      if (rank() == 0)
        collectives_->broadcast(buffer.span(), 0, {at::kLong, kTimeout});
      else
        collectives_->barrier(call());
    } catch (const std::exception&) {
      return;
    }
    throw std::runtime_error("ranks that made different calls went on");
  }

 private:
  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  uint64_t draw(uint64_t below) { return random_() % below; }
  // Mostly small; now and then several chunks of the ring.
  size_t draw_elements() {
    const uint64_t kind = draw(40);
    return kind == 0 ? 200'000 + draw(200'000) : kind < 4 ? 5'000 + draw(60'000) : draw(600);
  }
  Call call() const { return {wide_ ? at::kLong : at::kFloat, kTimeout}; }
  Reduction sum() const {
    return {ReduceOp::SUM, reduce_function(ReduceOp::SUM, wide_ ? at::kLong : at::kFloat), wide_ ? size_t{8} : 4};
  }

  Buffer filled(size_t elements, int as, bool shared = false, size_t shift = 0) {
    Buffer buffer(group_->heap(), shared, wide_, elements);
    for (size_t i = 0; i < elements; ++i) buffer.set(i, value(operation_, as, i + shift));
    return buffer;
  }
  void expect(Buffer& buffer, int from, size_t shift = 0) {
    for (size_t i = 0; i < buffer.elements(); ++i)
      if (buffer.get(i) != value(operation_, from, i + shift))
        wrong(i, buffer.get(i), value(operation_, from, i + shift));
  }
  void expect_sum(Buffer& buffer, size_t shift = 0) {
    for (size_t i = 0; i < buffer.elements(); ++i) {
      int64_t total = 0;
      for (int r = 0; r < size(); ++r) total += value(operation_, r, i + shift);
      if (buffer.get(i) != total) wrong(i, buffer.get(i), total);
    }
  }
  [[noreturn]] void wrong(size_t i, int64_t got, int64_t wanted) const {
    throw std::runtime_error("operation " + std::to_string(operation_) + ", rank " + std::to_string(rank()) +
        ", element " + std::to_string(i) + ": " + std::to_string(got) + " instead of " + std::to_string(wanted));
  }

  void broadcast(size_t elements, int root) {
    Buffer buffer = filled(elements, rank());
    collectives_->broadcast(buffer.span(), root, call());
    expect(buffer, root);
  }

  void allreduce(size_t elements, bool shared) {
    Buffer buffer = filled(elements, rank(), shared);
    collectives_->allreduce(buffer.span(), sum(), call());
    expect_sum(buffer);
  }

  void reduce(size_t elements, int root) {
    Buffer buffer = filled(elements, rank());
    collectives_->reduce(buffer.span(), root, sum(), call());
    rank() == root ? expect_sum(buffer) : expect(buffer, rank());
  }

  std::vector<Buffer> buffers(size_t elements) {
    std::vector<Buffer> made;
    for (int r = 0; r < size(); ++r) made.emplace_back(group_->heap(), false, wide_, elements);
    return made;
  }
  static std::vector<Span> spans(std::vector<Buffer>& buffers) {
    std::vector<Span> result;
    for (Buffer& buffer : buffers) result.push_back(buffer.span());
    return result;
  }

  void allgather(size_t elements, int root) {
    Buffer input = filled(elements, rank());
    std::vector<Buffer> outputs = buffers(elements);
    collectives_->allgather(input.span(), spans(outputs), call());
    for (int r = 0; r < size(); ++r) expect(outputs[static_cast<size_t>(r)], r);
    std::vector<Buffer> gathered = rank() == root ? buffers(elements) : std::vector<Buffer>();
    collectives_->gather(input.span(), spans(gathered), root, call());
    for (size_t r = 0; r < gathered.size(); ++r) expect(gathered[r], static_cast<int>(r));
  }

  void root_to_all(size_t elements, int root) {
    std::vector<Buffer> inputs;
    if (rank() == root)
      for (int r = 0; r < size(); ++r) inputs.push_back(filled(elements, r));
    Buffer output(group_->heap(), false, wide_, elements);
    collectives_->scatter(output.span(), spans(inputs), root, call());
    expect(output, rank());
  }

  void reduce_scatter(size_t elements) {
    std::vector<Buffer> inputs;
    for (int r = 0; r < size(); ++r) inputs.push_back(filled(elements, rank(), false, static_cast<size_t>(r)));
    Buffer output(group_->heap(), false, wide_, elements);
    collectives_->reduce_scatter(output.span(), spans(inputs), sum(), call());
    expect_sum(output, static_cast<size_t>(rank()));
  }

  void alltoall(size_t elements) {
    std::vector<Buffer> inputs, outputs;
    for (int r = 0; r < size(); ++r) {  // each pair has a size of its own
      inputs.push_back(filled(elements + static_cast<size_t>(rank() + 2 * r), rank(), false, static_cast<size_t>(r)));
      outputs.emplace_back(group_->heap(), false, wide_, elements + static_cast<size_t>(r + 2 * rank()));
    }
    collectives_->alltoall(spans(outputs), spans(inputs), call());
    for (int r = 0; r < size(); ++r) expect(outputs[static_cast<size_t>(r)], r, static_cast<size_t>(rank()));
  }

  // Around a ring, more than the table holds, received from the last to the first, with a collective in between.
  void messages(size_t elements, int root) {
    const size_t count = draw(20) == 0 ? Mailbox::kEntries + 10 : 1 + draw(4);
    elements = std::min<size_t>(elements, 5'000);
    const int next = (rank() + 1) % size(), previous = (rank() + size() - 1) % size();
    Pending pending;
    pending.left = 2 * count;
    std::vector<Buffer> sent, received;
    for (size_t m = 0; m < count; ++m) {
      sent.push_back(filled(elements, rank(), false, m));
      received.emplace_back(group_->heap(), false, wide_, elements);
    }
    const auto done = [&pending](int, std::exception_ptr error) { pending.end(error); };
    for (size_t m = 0; m < count; ++m) messenger_->send(sent[m].span(), next, static_cast<int>(m), kTimeout, done);
    broadcast(elements, root);
    for (size_t m = count; m-- > 0;)
      messenger_->receive(received[m].span(), previous, static_cast<int>(m), kTimeout, done);
    pending.wait();
    for (size_t m = 0; m < count; ++m) expect(received[m], previous, m);
  }

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Collectives> collectives_;
  const std::shared_ptr<Messenger> messenger_;
  std::mt19937_64 random_;  // in the same state on all ranks
  uint64_t operation_ = 0;
  bool wide_ = false;
};

void live(c10d::Store& store, int rank, int size, uint64_t operations, uint64_t seed) {
  uint64_t done = 0;
  for (uint64_t life = 0; done < operations; ++life) {
    const auto group = Group::join(store, rank, size, kTimeout, Mailbox::table_bytes(size), Exchange::ring_bytes());
    Rank member(group, seed + life);
    for (uint64_t i = 0; i < kOperationsOfAGroup && done < operations; ++i) member.operate(done++);
    if (life % 2 == 1) member.disagree();
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: %s RANKS OPERATIONS SEED\n", arguments[0]);
    return 2;
  }
  const int size = std::atoi(arguments[1]);
  const uint64_t operations = std::strtoull(arguments[2], nullptr, 10);
  const uint64_t seed = std::strtoull(arguments[3], nullptr, 10);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&store, rank, size, operations, seed] {
      try {
        live(*store, rank, size, operations, seed);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  std::printf("%d ranks, %llu operations each, seed %llu: all right\n", size,
      static_cast<unsigned long long>(operations), static_cast<unsigned long long>(seed));
  return 0;
}
