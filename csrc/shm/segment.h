// The memory that a rank shares with its group.
//
// Every rank owns one segment, an anonymous memory file that never had a name: nothing appears in
// /dev/shm, and the kernel frees it when the last process that maps it is gone, however it went.
// Its pages are allocated when they are first touched, so a segment may be as large as the machine's
// memory and cost nothing. What always holds:
//   - all segments of a group have one layout, so an offset means the same in each of them;
//   - a rank writes to a peer's segment in the first `writable` bytes alone (counters, tables); the
//     kernel stops it elsewhere. What lies in a SharedHeap is written by its owner only.
//   - a forked child shares none of it (owner.h).
// Who may map a segment: the file has no name and mode 0600, so it is opened through its owner's
// /proc/<pid>/fd by processes of the same user that the kernel would also let trace the owner. Its size
// is sealed: no peer can shrink it under the others' hands.
// Threads: a Segment is immutable; SharedHeap locks itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <sys/types.h>
#include <unordered_map>

#include "owner.h"

namespace minddp::shm {

constexpr std::size_t kCacheLine = 64;

inline std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// One mapping of one rank's segment. Unmapped by the destructor.
class Segment {
 public:
  // Makes this process's own segment; descriptor() stays open as long as it lives.
  // Throws std::system_error.
  static std::shared_ptr<Segment> create(std::size_t bytes);

  // Maps the segment that process `pid` holds open as `descriptor`. Throws std::system_error, or
  // std::runtime_error when that is not a segment of this user and size.
  static std::shared_ptr<Segment> attach(pid_t pid, int descriptor, std::size_t bytes, std::size_t writable);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }

  bool contains(const void* address, std::size_t bytes) const;

 private:
  template <class T, class... Arguments>
  friend std::shared_ptr<T> make_owned(Arguments&&... arguments);

  // Takes the descriptor over.
  Segment(int descriptor, std::size_t bytes);

  int descriptor_;
  std::size_t bytes_;
  char* base_;
  std::optional<ForkGuard> guard_;
};

// A std::bad_alloc that says how much there is.
class OutOfSharedMemory : public std::bad_alloc {
 public:
  explicit OutOfSharedMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// An allocator for the part of the own segment from `begin` on: best fit, neighbours merged.
class SharedHeap {
 public:
  SharedHeap(std::shared_ptr<Segment> segment, std::size_t begin);

  // 64-byte aligned (page aligned from one page on). Throws OutOfSharedMemory when nothing fits.
  // REQUIRES: bytes > 0
  char* allocate(std::size_t bytes);

  // Does nothing in a forked child, where the memory is still the parent's.
  void free(char* address);

  std::size_t used() const;

 private:
  using Offset = std::size_t;

  std::string describe_lack(std::size_t bytes) const;
  void insert_free(Offset offset, std::size_t bytes);

  const Owner owner_;
  const std::shared_ptr<Segment> segment_;
  mutable std::mutex mutex_;
  std::map<Offset, std::size_t> free_;             // GUARDED_BY(mutex_)
  std::unordered_map<Offset, std::size_t> taken_;  // GUARDED_BY(mutex_)
  std::size_t used_ = 0;                           // GUARDED_BY(mutex_)
};

// The size of each rank's segment: together they may hold the machine's whole memory.
std::size_t segment_bytes(int world_size);

}  // namespace minddp::shm
