#include "segment.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <new>
#include <sys/mman.h>
#include <system_error>
#include <unistd.h>

namespace minddp::shm {

namespace {

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kMinimumSegment = std::size_t{256} << 20;

// Blocks from this size on give their pages back when freed; smaller ones stay warm, because a page
// fault costs more than copying the page.
constexpr std::size_t kReturnPagesFrom = std::size_t{64} << 20;

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Segment::Segment(int descriptor, std::size_t bytes) : descriptor_(descriptor), bytes_(bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (base == MAP_FAILED) {
    const int error = errno;
    ::close(descriptor);
    errno = error;
    throw_errno("mmap of " + std::to_string(bytes) + " bytes of shared memory");
  }
  base_ = static_cast<char*>(base);
  ::madvise(base_, bytes, MADV_DONTDUMP);
}

Segment::~Segment() {
  close_descriptor();
  ::munmap(base_, bytes_);
}

std::shared_ptr<Segment> Segment::create(std::size_t bytes) {
  const int descriptor = ::memfd_create("minddp-shm", MFD_CLOEXEC);
  if (descriptor < 0) throw_errno("memfd_create");
  if (::ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    ::close(descriptor);
    errno = error;
    throw_errno("ftruncate of shared memory to " + std::to_string(bytes) + " bytes");
  }
  return std::shared_ptr<Segment>(new Segment(descriptor, bytes));
}

std::shared_ptr<Segment> Segment::attach(pid_t pid, int descriptor, std::size_t bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) throw_errno("open of " + path);
  std::shared_ptr<Segment> segment(new Segment(opened, bytes));
  segment->close_descriptor();
  return segment;
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
    descriptor_ = -1;
  }
}

bool Segment::contains(const void* address, std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(base_);
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  return first >= begin && first - begin <= bytes_ && bytes <= bytes_ - (first - begin);
}

SharedHeap::SharedHeap(std::shared_ptr<Segment> segment, std::size_t begin) : segment_(std::move(segment)) {
  const std::size_t first = round_up(begin, kPage);
  free_.emplace(first, segment_->bytes() - first);
}

char* SharedHeap::allocate(std::size_t bytes) {
  const std::size_t unit = bytes >= kPage ? kPage : kCacheLine;
  const std::size_t needed = round_up(bytes, unit);
  std::lock_guard<std::mutex> lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const std::size_t padding = round_up(it->first, unit) - it->first;
    if (it->second >= padding + needed && (best == free_.end() || it->second < best->second)) best = it;
  }
  if (best == free_.end()) throw std::bad_alloc();
  const auto [begin, size] = *best;
  free_.erase(best);
  const Offset offset = round_up(begin, unit);
  if (offset > begin) free_.emplace(begin, offset - begin);
  if (offset + needed < begin + size) free_.emplace(offset + needed, begin + size - offset - needed);
  taken_.emplace(offset, needed);
  used_ += needed;
  return segment_->base() + offset;
}

void SharedHeap::free(char* address) {
  const Offset offset = static_cast<Offset>(address - segment_->base());
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = taken_.find(offset);
  const std::size_t bytes = it->second;
  taken_.erase(it);
  used_ -= bytes;
  if (bytes >= kReturnPagesFrom) ::madvise(address, bytes, MADV_REMOVE);
  insert_free(offset, bytes);
}

void SharedHeap::insert_free(Offset offset, std::size_t bytes) {
  const auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    free_.erase(next);
  }
  auto previous = free_.lower_bound(offset);
  if (previous != free_.begin() && (--previous)->first + previous->second == offset) {
    previous->second += bytes;
    return;
  }
  free_.emplace(offset, bytes);
}

std::size_t SharedHeap::used() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

std::size_t segment_bytes(int world_size) {
  const std::size_t memory =
      static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return round_up(std::max(memory / static_cast<std::size_t>(world_size), kMinimumSegment), kPage);
}

}  // namespace minddp::shm
