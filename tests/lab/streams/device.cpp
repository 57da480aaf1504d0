#include "device.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace streams {

namespace {
constexpr unsigned char kPoison = 0xff;  // a NaN in every floating type
constexpr size_t kManyRaces = 20;

std::string named(int64_t stream, const std::string& what) { return what + " on stream " + std::to_string(stream); }

bool knows(const Clock& clock, int64_t stream, uint64_t epoch) {
  auto known = clock.find(stream);
  return known != clock.end() && known->second >= epoch;
}
}  // namespace

Device::Block* Device::find(const void* memory) {
  auto next = blocks_.upper_bound(reinterpret_cast<uintptr_t>(memory));
  if (next == blocks_.begin()) return nullptr;
  auto& [begin, block] = *std::prev(next);
  return reinterpret_cast<uintptr_t>(memory) < begin + std::max<size_t>(block.nbytes, 1) ? &block : nullptr;
}

void Device::tell(const std::string& race) {
  if (races_.size() < kManyRaces) races_.push_back(race);
}

void Device::check(int64_t stream, uint64_t epoch, const Clock& clock, const Range& range, const std::string& what) {
  Block* block = range.nbytes ? find(range.begin) : nullptr;
  if (!block || block->pinned) return;
  const auto begin = reinterpret_cast<uintptr_t>(range.begin);
  const uintptr_t end = begin + range.nbytes;
  if (block->freed) tell(named(stream, what) + " uses memory that has been freed");
  for (const Access& other : block->accesses) {
    if (other.begin >= end || begin >= other.end || !(other.write || range.write)) continue;
    if (knows(clock, other.stream, other.epoch)) continue;
    tell(named(stream, what) + (range.write ? " writes" : " reads") + " what " + named(other.stream, other.what) +
        (other.write ? " writes" : " reads") + ", and does not wait for it");
  }
  if (range.write && range.nbytes == block->nbytes) block->accesses.clear();
  block->accesses.push_back({stream, epoch, begin, end, range.write, what});
}

std::vector<Device::Block*> Device::take_over(
    Block& block, int64_t stream, const Clock& clock, const std::string& what) {
  std::vector<Block*> old = std::exchange(block.could_be, {});
  for (Block* freed : old) {
    Clock known = clock;
    for (const TicketPtr& ticket : freed->freed_after) join(known, ticket->clock);
    for (const Access& other : freed->accesses)
      if (!knows(known, other.stream, other.epoch))
        tell(named(stream, what) + " may write where " + named(other.stream, other.what) +
            (other.write ? " writes" : " reads") + ": freed, and the allocator does not know of that stream");
  }
  return old;
}

// Whoever gets it next, every use of it came before.
bool Device::settled(const Block& freed) {
  Clock known = clocks_[freed.stream];
  for (const TicketPtr& ticket : freed.freed_after) join(known, ticket->clock);
  return std::all_of(freed.accesses.begin(), freed.accesses.end(),
      [&](const Access& access) { return knows(known, access.stream, access.epoch); });
}

void Device::enqueue(int64_t stream, const std::string& what, std::vector<Range> ranges, std::function<void()> run) {
  const Lock lock(*this);
  ++counts_["enqueue"];
  Clock& clock = clocks_[stream];
  join(clock, host_);
  const uint64_t epoch = ++clock[stream];
  last_[stream] = what;
  std::vector<Block*> overwritten;
  for (const Range& range : ranges) {
    check(stream, epoch, clock, range, what);
    Block* block = range.write && range.nbytes ? find(range.begin) : nullptr;
    if (!block || block->could_be.empty()) continue;
    for (Block* freed : take_over(*block, stream, clock, what)) overwritten.push_back(freed);
  }
  auto overwrite_and_run = [overwritten, run = std::move(run)] {
    for (Block* freed : overwritten)
      if (std::all_of(freed->freed_after.begin(), freed->freed_after.end(), [](auto& t) { return t->done; }))
        std::memset(freed->memory.get(), kPoison, freed->nbytes);
    run();
  };
  queues_[stream].push_back({std::move(overwrite_and_run), nullptr, nullptr});
  maybe_run();
}

TicketPtr Device::record(int64_t stream) {
  std::scoped_lock lock(mutex_);
  auto ticket = std::make_shared<Ticket>();
  join(clocks_[stream], host_);
  ticket->clock = clocks_[stream];
  queues_[stream].push_back({nullptr, nullptr, ticket});
  return ticket;
}

void Device::block(const TicketPtr& ticket, int64_t stream) {
  std::scoped_lock lock(mutex_);
  if (!ticket || leaves_out("block")) return;
  ++counts_["block"];
  join(clocks_[stream], ticket->clock);
  queues_[stream].push_back({nullptr, ticket, nullptr});
}

// One entry of a stream that may go on; false where there is none.
bool Device::step() {
  std::vector<int64_t> ready;
  for (auto& [stream, queue] : queues_)
    if (!queue.empty() && (!queue.front().waits_for || queue.front().waits_for->done)) ready.push_back(stream);
  if (ready.empty()) return false;
  int64_t chosen = ready[dice_() % ready.size()];
  if (by_priority_) {
    if (dice_() % 16 == 0) priorities_.clear();
    for (int64_t stream : ready) priorities_.try_emplace(stream, dice_());
    chosen = *std::max_element(
        ready.begin(), ready.end(), [&](int64_t a, int64_t b) { return priorities_[a] < priorities_[b]; });
  }
  Entry entry = std::move(queues_[chosen].front());
  queues_[chosen].pop_front();
  if (entry.run) entry.run();
  if (entry.marks) entry.marks->done = true;
  ran_.push_back(std::move(entry));
  return true;
}

void Device::synchronize(const TicketPtr& ticket) {
  const Lock lock(*this);
  ++counts_["synchronize"];
  if (!ticket) return;
  while (!ticket->done)
    if (!step()) throw std::runtime_error("the host waits for what no stream can reach");
  join(host_, ticket->clock);
}

void Device::synchronize_all() {
  const Lock lock(*this);
  while (step()) {
  }
  for (auto& [stream, queue] : queues_)
    if (!queue.empty()) throw std::runtime_error("a stream waits for what never comes");
  for (auto& [stream, clock] : clocks_) join(host_, clock);
  std::erase_if(blocks_, [](const auto& entry) { return entry.second.freed; });
  freed_.clear();
  for (auto& [begin, block] : blocks_) {
    block.accesses.clear();
    block.could_be.clear();
  }
}

std::vector<std::string> Device::unjoined(int64_t stream) {
  std::scoped_lock lock(mutex_);
  Clock known = clocks_[stream];
  join(known, host_);
  std::vector<std::string> found;
  for (const auto& [other, what] : last_)
    if (!knows(known, other, clocks_[other][other])) found.push_back(named(other, what));
  return found;
}

void* Device::allocate(size_t nbytes, int64_t stream, bool pinned) {
  std::scoped_lock lock(mutex_);
  Block block;
  block.memory = std::make_unique<char[]>(std::max<size_t>(nbytes, 1));
  std::memset(block.memory.get(), kPoison, nbytes);
  block.nbytes = nbytes;
  block.stream = stream;
  block.pinned = pinned;
  if (!pinned) {
    block.could_be = freed_[stream];
    std::erase_if(freed_[stream], [&](Block* freed) { return settled(*freed); });  // they stand in this one's list
  }
  void* memory = block.memory.get();
  blocks_.emplace(reinterpret_cast<uintptr_t>(memory), std::move(block));
  return memory;
}

void Device::free(void* memory) {
  std::scoped_lock lock(mutex_);
  Block* block = find(memory);
  if (!block || block->freed) throw std::runtime_error("freed twice, or never allocated");
  block->freed = true;
  if (block->pinned) return;  // given away after the copies that it was recorded on
  for (int64_t stream : block->recorded_on) block->freed_after.push_back(record(stream));
  freed_[block->stream].push_back(block);
}

void Device::record_use(const void* memory, int64_t stream) {
  std::scoped_lock lock(mutex_);
  Block* block = find(memory);
  if (!block || leaves_out("record_use")) return;
  ++counts_["record_use"];
  if (block->pinned || stream != block->stream) block->recorded_on.insert(stream);
}

}  // namespace streams
