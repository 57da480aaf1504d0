#include "counter.h"

#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace minddp::shm {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(20);
constexpr int kPausesPerClockRead = 32;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Counter::store(uint32_t value) {
  // Sequentially consistent, not only release: the value must be visible before sleepers_ is read,
  // or a peer that goes to sleep in between would be missed (it raises sleepers_, then reads value_).
  value_.store(value, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) wake();
}

void Counter::wake() {
  // Not FUTEX_PRIVATE_FLAG: the sleepers are other processes.
  ::syscall(SYS_futex, &value_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Counter::spin(uint32_t target) const {
  if (reached(target)) return true;
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      pause();
      if (reached(target)) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void Counter::sleep(uint32_t seen, std::chrono::milliseconds limit) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(limit.count() / 1000);
  time.tv_nsec = static_cast<long>(limit.count() % 1000) * 1000000L;
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &value_, FUTEX_WAIT, seen, &time, nullptr, 0);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace minddp::shm
