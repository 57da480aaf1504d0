// Who owns what after fork().
//
// A forked child has a copy of every object of this transport, but it is no rank: its peers do not know it, and the
// threads that worked for these objects are not there. What always holds
//   - An object of make_owned() is destroyed by the process that made it. A forked child's copy is never destroyed:
//     there nothing is announced, unmapped or joined.
//   - A child has none of the shared memory (segment.h).
// Threads: any.
#pragma once

#include <memory>
#include <unistd.h>
#include <utility>

namespace minddp::shm {

// The process that made this object.
class Owner {
 public:
  bool here() const { return ::getpid() == pid_; }
  pid_t pid() const { return pid_; }

 private:
  const pid_t pid_ = ::getpid();
};

template <class T, class... Arguments>
std::shared_ptr<T> make_owned(Arguments&&... arguments) {
  return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), [owner = Owner()](T* object) {
    if (owner.here()) delete object;
  });
}

}  // namespace minddp::shm
