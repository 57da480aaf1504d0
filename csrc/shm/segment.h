// The memory that a rank shares with its group.
//
// Every rank owns one segment, an anonymous memory file that never had a name: nothing appears in
// /dev/shm, and the kernel frees it when the last process that maps it is gone, however it went.
// Its pages are allocated when they are first touched, so a segment may be as large as the machine's
// memory and cost nothing. What always holds:
//   - all segments of a group have one layout, so an offset means the same in each of them;
//   - a SharedHeap hands out memory of the own segment only; peers read and write it by offset.
// Threads: a Segment is immutable; SharedHeap locks itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/types.h>
#include <unordered_map>

namespace minddp::shm {

// One mapping of one rank's segment. Unmapped by the destructor.
class Segment {
 public:
  // Makes this process's own segment; descriptor() stays open until close_descriptor().
  // Throws std::system_error.
  static std::shared_ptr<Segment> create(std::size_t bytes);

  // Maps the segment that process `pid` holds open as `descriptor`. Throws std::system_error.
  static std::shared_ptr<Segment> attach(pid_t pid, int descriptor, std::size_t bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }

  // Nobody can attach any more.
  void close_descriptor();

  bool contains(const void* address, std::size_t bytes) const;

 private:
  Segment(int descriptor, std::size_t bytes);

  int descriptor_;
  std::size_t bytes_;
  char* base_;
};

// An allocator for the part of the own segment from `begin` on: best fit, neighbours merged.
class SharedHeap {
 public:
  SharedHeap(std::shared_ptr<Segment> segment, std::size_t begin);

  // 64-byte aligned (page aligned from one page on). Throws std::bad_alloc when nothing fits.
  // REQUIRES: bytes > 0
  char* allocate(std::size_t bytes);
  void free(char* address);

  std::size_t used() const;

 private:
  using Offset = std::size_t;

  void insert_free(Offset offset, std::size_t bytes);

  const std::shared_ptr<Segment> segment_;
  mutable std::mutex mutex_;
  std::map<Offset, std::size_t> free_;             // GUARDED_BY(mutex_)
  std::unordered_map<Offset, std::size_t> taken_;  // GUARDED_BY(mutex_)
  std::size_t used_ = 0;                           // GUARDED_BY(mutex_)
};

// The size of each rank's segment: together they may hold the machine's whole memory.
std::size_t segment_bytes(int world_size);

}  // namespace minddp::shm
