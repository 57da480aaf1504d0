#include "owner.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <pthread.h>
#include <sys/mman.h>
#include <system_error>
#include <unistd.h>
#include <vector>

namespace minddp::shm {
namespace {

struct Guarded {
  void* base;
  std::size_t bytes;
  int descriptor;
};

// How many forks lie between the process that loaded this code and this process.
std::atomic<uint32_t> forks{0};

// Never destroyed: a fork during exit still finds them.
std::mutex& guarded_mutex = *new std::mutex;
std::vector<Guarded>& guarded = *new std::vector<Guarded>;  // GUARDED_BY(guarded_mutex)

void before_fork() { guarded_mutex.lock(); }

void in_parent() { guarded_mutex.unlock(); }

// In the place of the shared mapping, which the child must not keep in any case.
void make_private(const Guarded& memory) {
  const bool own = memory.descriptor >= 0;
  const int protection = own ? PROT_READ | PROT_WRITE : PROT_NONE;
  const int flags = MAP_FIXED | MAP_PRIVATE | MAP_NORESERVE | (own ? 0 : MAP_ANONYMOUS);
  if (::mmap(memory.base, memory.bytes, protection, flags, memory.descriptor, 0) == MAP_FAILED) {
    if (::mprotect(memory.base, memory.bytes, own ? PROT_READ : PROT_NONE) != 0) ::_exit(127);
  } else if (own) {
    ::madvise(memory.base, memory.bytes, MADV_DONTDUMP);
  }
  if (own) ::close(memory.descriptor);
}

// The other threads are gone, and whatever they held stays locked: only the kernel is called here. The
// child's own children inherit its private mappings as they are.
void in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  for (const Guarded& memory : guarded) make_private(memory);
  guarded.clear();
  guarded_mutex.unlock();
}

uint32_t forks_until_now() {
  static const int registered = ::pthread_atfork(before_fork, in_parent, in_child);
  if (registered != 0) throw std::system_error(registered, std::generic_category(), "pthread_atfork");
  return forks.load(std::memory_order_relaxed);
}

}  // namespace

Owner::Owner() : forks_(forks_until_now()), pid_(::getpid()) {}

bool Owner::here() const { return forks_ == forks.load(std::memory_order_relaxed); }

ForkGuard::ForkGuard(void* base, std::size_t bytes, int descriptor) : base_(base) {
  forks_until_now();
  const std::lock_guard<std::mutex> lock(guarded_mutex);
  guarded.push_back({base, bytes, descriptor});
}

ForkGuard::~ForkGuard() {
  const std::lock_guard<std::mutex> lock(guarded_mutex);
  const auto is_this = [this](const Guarded& memory) { return memory.base == base_; };
  guarded.erase(std::remove_if(guarded.begin(), guarded.end(), is_this), guarded.end());
}

}  // namespace minddp::shm
