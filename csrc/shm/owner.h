// Who owns what after fork().
//
// A forked child has a copy of every object of this transport, but it is not the rank: its peers know
// nothing of it, and the threads that worked for these objects are not there. What always holds
//   - An object made by make_owned() is destroyed by the process that made it; a forked child's copy
//     is never destroyed: nothing is announced, freed, given back or joined there.
//   - What a child writes never reaches the parent or its peers: the child sees the own segment through
//     a private copy-on-write mapping, and cannot touch the peers' at all. Until it writes to a page,
//     it sees there what the parent has there now, which may change as the parent goes on.
// fork() means the C library's, as Python and multiprocessing call it; a clone() made past it is not seen.
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <sys/types.h>
#include <utility>

namespace minddp::shm {

// The process that made this object.
class Owner {
 public:
  Owner();

  // Whether this is that process, not one forked from it.
  bool here() const;
  pid_t pid() const { return pid_; }

 private:
  uint32_t forks_;
  pid_t pid_;
};

template <class T, class... Arguments>
std::shared_ptr<T> make_owned(Arguments&&... arguments) {
  return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), [owner = Owner()](T* object) {
    if (owner.here()) delete object;
  });
}

// Memory that a forked child must not share. `descriptor` is the file behind it, which stays open until
// remove(); -1: a child cannot touch this memory.
class ForkGuard {
 public:
  ForkGuard(void* base, std::size_t bytes, int descriptor);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

 private:
  void* base_;
};

}  // namespace minddp::shm
