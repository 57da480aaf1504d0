// A device that exists nowhere: what streams, events and a caching allocator promise, and no more than that.
//
// A stream is a queue of closures over host memory. Nothing runs before it must (a host that synchronizes) or a die
// says so; then any stream whose next entry waits for nothing may go on, so that one program has many legal orders.
// Memory that was freed may be any that is allocated on its stream from then on, once the streams that it was
// recorded on have come past that moment: the first to write to new memory overwrites all that was freed.
//
// Beside the values goes a proof. Every stream has a vector clock of what its next entry comes after; an access to
// memory that is not ordered after an earlier one, one of the two a write, is a race, whether the order drawn shows
// it or not.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace streams {

using Clock = std::map<int64_t, uint64_t>;  // by stream: how many of its entries

struct Ticket {  // one recording of an event
  bool done = false;
  Clock clock;
};
using TicketPtr = std::shared_ptr<Ticket>;

struct Range {
  const void* begin;
  size_t nbytes;
  bool write;
};

// All functions may be called from any thread; none runs Python. `mutex_` is recursive: closures free memory.
class Device {
 public:
  static Device& get() {
    static Device* device = new Device;  // never destroyed: tensors may outlive main
    return *device;
  }

  void seed(uint64_t seed) {
    std::scoped_lock lock(mutex_);
    dice_.seed(seed);
    eagerness_ = std::vector<double>{0, 0.3, 1.5}[dice_() % 3];
    by_priority_ = dice_() % 2 == 1;
    priorities_.clear();
  }

  void enqueue(int64_t stream, const std::string& what, std::vector<Range> ranges, std::function<void()> run);
  TicketPtr record(int64_t stream);
  void block(const TicketPtr& ticket, int64_t stream);
  bool query(const TicketPtr& ticket) {  // a host that has seen the end has waited for it
    std::scoped_lock lock(mutex_);
    if (ticket->done) join(host_, ticket->clock);
    return ticket->done;
  }
  // The host waits.
  void synchronize(const TicketPtr& ticket);
  void synchronize(int64_t stream) { synchronize(record(stream)); }
  void synchronize_all();
  // What other streams have been given and `stream` has not been ordered after: of each its last entry. A CUDA graph
  // cannot be captured with any.
  std::vector<std::string> unjoined(int64_t stream);

  void* allocate(size_t nbytes, int64_t stream, bool pinned);
  void free(void* memory);
  void record_use(const void* memory, int64_t stream);
  bool owns(const void* memory) {
    std::scoped_lock lock(mutex_);
    return find(memory) != nullptr;
  }
  bool is_pinned(const void* memory) {
    std::scoped_lock lock(mutex_);
    Block* block = find(memory);
    return block && block->pinned;
  }

  void count(const std::string& what) {
    std::scoped_lock lock(mutex_);
    ++counts_[what];
  }
  std::map<std::string, int64_t> take_counts() {
    std::scoped_lock lock(mutex_);
    return std::exchange(counts_, {});
  }
  std::vector<std::string> take_races() {
    std::scoped_lock lock(mutex_);
    return std::exchange(races_, {});
  }
  // From now on the n-th call of "block" or "record_use" is left out; -1: none. Counted from 0.
  void leave_out(const std::string& what, int64_t n) {
    std::scoped_lock lock(mutex_);
    left_out_ = what;
    left_out_at_ = n;
    calls_ = 0;
  }

 private:
  struct Entry {
    std::function<void()> run;
    TicketPtr waits_for, marks;
  };
  struct Access {
    int64_t stream;
    uint64_t epoch;
    uintptr_t begin, end;
    bool write;
    std::string what;
  };
  struct Block {
    std::unique_ptr<char[]> memory;
    size_t nbytes = 0;
    int64_t stream = 0;
    bool pinned = false, freed = false;
    std::set<int64_t> recorded_on;
    std::vector<Access> accesses;
    std::vector<TicketPtr> freed_after;  // what its allocator waits for
    std::vector<Block*> could_be;        // new memory: what was freed on its stream before
  };

  Block* find(const void* memory);
  void check(int64_t stream, uint64_t epoch, const Clock& clock, const Range& range, const std::string& what);
  void tell(const std::string& race);
  bool settled(const Block& freed);
  // The freed memory that this, the first write to new memory, may change.
  std::vector<Block*> take_over(Block& block, int64_t stream, const Clock& clock, const std::string& what);
  bool step();
  bool leaves_out(const std::string& what) { return left_out_ == what && calls_++ == left_out_at_; }
  static void join(Clock& clock, const Clock& other) {
    for (const auto& [stream, epoch] : other) clock[stream] = std::max(clock[stream], epoch);
  }
  void maybe_run() {
    for (double luck = eagerness_; luck > 0 && std::uniform_real_distribution<>()(dice_) < luck; luck -= 0.5)
      if (!step()) return;
  }

  // What has run may hold the last reference to something of Python's, whose end waits for the GIL; and who holds the
  // GIL may wait for the device. So it is dropped when nobody holds the lock any more.
  class Lock {
   public:
    explicit Lock(Device& device) : device_(device) { device_.mutex_.lock(), ++device_.depth_; }
    ~Lock() {
      std::vector<Entry> over;
      if (--device_.depth_ == 0) over.swap(device_.ran_);
      device_.mutex_.unlock();
    }

   private:
    Device& device_;
  };

  std::recursive_mutex mutex_;
  int depth_ = 0;
  std::vector<Entry> ran_;
  std::mt19937_64 dice_;
  double eagerness_ = 0;
  bool by_priority_ = false;
  std::map<int64_t, uint64_t> priorities_;
  std::map<int64_t, std::deque<Entry>> queues_;
  std::map<int64_t, Clock> clocks_;
  std::map<int64_t, std::string> last_;           // by stream: what was enqueued last
  Clock host_;                                    // what the host has waited for
  std::map<uintptr_t, Block> blocks_;             // by address; what was freed stays until all streams are empty
  std::map<int64_t, std::vector<Block*>> freed_;  // by stream
  std::vector<std::string> races_;
  std::map<std::string, int64_t> counts_;
  std::string left_out_;
  int64_t left_out_at_ = -1, calls_ = 0;
};

}  // namespace streams
