// Random all-reduces and barriers of the shm transport, checked, with each rank a thread of one process: so a
// sanitizer sees what all ranks do to the memory that they share.
//
//   shm_driver RANKS OPERATIONS SEED
//
// All ranks draw the same operations from the same seed. What a rank contributes is a function of (operation,
// rank, element), so each knows what must come out. Now and then the group ends and another begins; some of
// these are ended by ranks that make different calls.
//
// Each rank maps each peer's segment: one file at many addresses, which a sanitizer would take for as many
// memories. one_mapping.cpp gives it one.
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "shm/allreduce.h"
#include "shm/group.h"
#include "shm/owner.h"

namespace {

using namespace minddp::shm;
using c10d::ReduceOp;
using std::chrono::milliseconds;

constexpr milliseconds kTimeout{120'000};  // a sanitizer slows all down, and the machine may be busy
constexpr uint64_t kOperationsOfAGroup = 2'000;

// int64 or float elements.
class Buffer {
 public:
  Buffer(bool wide, size_t elements) : wide_(wide), data_(elements * (wide ? 8 : 4)) {}

  Span span() { return {data_.data(), data_.size()}; }
  size_t elements() const { return data_.size() / (wide_ ? 8 : 4); }
  int64_t get(size_t i) const { return wide_ ? element<int64_t>(i) : static_cast<int64_t>(element<float>(i)); }
  void set(size_t i, int64_t value) {
    if (wide_)
      put<int64_t>(i, value);
    else
      put<float>(i, static_cast<float>(value));
  }

 private:
  template <class T>
  T element(size_t i) const {
    T value;
    std::memcpy(&value, data_.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void put(size_t i, T value) {
    std::memcpy(data_.data() + i * sizeof(T), &value, sizeof(T));
  }

  bool wide_;
  std::vector<char> data_;
};

// Small whole numbers: every order of adding them gives the same.
int64_t value(uint64_t operation, int rank, size_t i) {
  return static_cast<int64_t>((operation * 13 + static_cast<uint64_t>(rank) * 7 + i * 3) % 11);
}

// One rank's part of one group's life.
class Rank {
 public:
  Rank(const std::shared_ptr<Group>& group, uint64_t seed)
      : group_(group), allreduce_(make_owned<Allreduce>(group)), random_(seed) {}

  void operate(uint64_t operation) {
    if (draw(10) == 0) return allreduce_->barrier(kTimeout);
    const bool wide = draw(2) != 0;
    Buffer buffer(wide, draw_elements());
    for (size_t i = 0; i < buffer.elements(); ++i) buffer.set(i, value(operation, group_->rank(), i));
    allreduce_->run(buffer.span(), sum(wide), kTimeout);
    for (size_t i = 0; i < buffer.elements(); ++i) {
      int64_t total = 0;
      for (int r = 0; r < group_->size(); ++r) total += value(operation, r, i);
      if (buffer.get(i) != total)
        throw std::runtime_error("operation " + std::to_string(operation) + ", rank " +
            std::to_string(group_->rank()) + ", element " + std::to_string(i) + ": " + std::to_string(buffer.get(i)) +
            " instead of " + std::to_string(total));
    }
  }

  // Ranks make different calls: all of them raise.
  void disagree() {
    Buffer buffer(true, 16);
    try {
      group_->rank() == 0 ? allreduce_->run(buffer.span(), sum(true), kTimeout) : allreduce_->barrier(kTimeout);
    } catch (const std::exception&) {
      return;
    }
    throw std::runtime_error("ranks that made different calls went on");
  }

 private:
  uint64_t draw(uint64_t below) { return random_() % below; }
  // Mostly small; now and then several chunks of the ring.
  size_t draw_elements() {
    const uint64_t kind = draw(40);
    return kind == 0 ? 200'000 + draw(200'000) : kind < 8 ? 5'000 + draw(60'000) : draw(600);
  }
  static Reduction sum(bool wide) {
    const at::ScalarType dtype = wide ? at::kLong : at::kFloat;
    return {ReduceOp::SUM, dtype, minddp::reduce_function(ReduceOp::SUM, dtype)};
  }

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Allreduce> allreduce_;
  std::mt19937_64 random_;  // in the same state on all ranks
};

void live(const std::vector<std::shared_ptr<Segment>>& segments, int rank, uint64_t begin, uint64_t end,
    uint64_t seed, bool disagrees) {
  std::vector<Card> cards;
  for (const auto& segment : segments) cards.push_back(Group::card_of(*segment));
  const auto group = make_owned<Group>(segments[static_cast<size_t>(rank)], rank, cards);
  Rank member(group, seed);
  for (uint64_t operation = begin; operation < end; ++operation) member.operate(operation);
  if (disagrees) member.disagree();
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
  for (uint64_t begin = 0, lives = 0; begin < operations; begin += kOperationsOfAGroup, ++lives) {
    const uint64_t end = std::min(begin + kOperationsOfAGroup, operations);
    std::vector<std::shared_ptr<Segment>> segments;
    for (int rank = 0; rank < size; ++rank) segments.push_back(Group::make_segment());
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          live(segments, rank, begin, end, seed + lives, lives % 2 == 0);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
          std::_Exit(1);
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
  std::printf("%d ranks, %llu operations each, seed %llu: all right\n", size,
      static_cast<unsigned long long>(operations), static_cast<unsigned long long>(seed));
  return 0;
}
