// The memory that a rank shares with its group.
//
// Every rank owns one segment, an anonymous memory file that never had a name: nothing appears in /dev/shm, and the
// kernel frees it when the last process that maps it is gone, however it went. What always holds:
//   - All segments of a group have one layout, so an offset means the same in each of them.
//   - A rank writes to a peer's segment in the first `writable` bytes alone; the kernel stops it elsewhere.
//   - A forked child has no mapping of any segment.
// Who may map a segment: the file has no name and mode 0600. It is opened through its owner's /proc/<pid>/fd, by
// processes of the same user that the kernel would also let trace the owner, until the owner calls close(). Its size
// is sealed: no peer can shrink it under the others' hands.
// Threads: a Segment is immutable but for close().
#pragma once

#include <cstddef>
#include <memory>
#include <sys/types.h>

#include "owner.h"

namespace minddp::shm {

constexpr std::size_t kCacheLine = 64;

inline std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// One mapping of one rank's segment. Unmapped by the destructor.
class Segment {
 public:
  // Makes this process's own segment, all zeros, which peers can map until close(). Throws std::system_error.
  static std::shared_ptr<Segment> create(std::size_t bytes);

  // Maps the segment that process `pid` holds open as `descriptor`. Throws std::system_error, or
  // std::runtime_error if that is not a segment of this user and size.
  static std::shared_ptr<Segment> attach(pid_t pid, int descriptor, std::size_t bytes, std::size_t writable);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* base() const { return base_; }
  int descriptor() const { return descriptor_; }  // -1: nobody maps it any more
  void close();

 private:
  template <class T, class... Arguments>
  friend std::shared_ptr<T> make_owned(Arguments&&... arguments);

  // Takes the descriptor over.
  Segment(int descriptor, std::size_t bytes);

  int descriptor_;
  std::size_t bytes_;
  char* base_;
};

}  // namespace minddp::shm
