#include "segment.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace minddp::shm {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMinimumSegment = std::size_t{256} << 20;

// Blocks from this size on give their pages back when freed; smaller ones stay warm, because a page
// fault costs more than copying the page.
constexpr std::size_t kReturnPagesFrom = std::size_t{64} << 20;

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

constexpr char kName[] = "minddp-shm";
constexpr mode_t kMode = S_IRUSR | S_IWUSR;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// An open file; closed on the way out unless released.
struct Descriptor {
  ~Descriptor() {
    const int error = errno;
    if (number >= 0) ::close(number);
    errno = error;
  }
  int release() { return std::exchange(number, -1); }

  int number;
};

// "" when the link cannot be read.
std::string target_of(const std::string& path) {
  char target[256] = {};
  return ::readlink(path.c_str(), target, sizeof(target) - 1) > 0 ? target : "";
}

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

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
  guard_.reset();
  if (descriptor_ >= 0) ::close(descriptor_);
  ::munmap(base_, bytes_);
}

std::shared_ptr<Segment> Segment::create(std::size_t bytes) {
  Descriptor file{::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (file.number < 0) throw_errno("memfd_create");
  if (::fchmod(file.number, kMode) != 0) throw_errno("fchmod of shared memory");
  if (::ftruncate(file.number, static_cast<off_t>(bytes)) != 0)
    throw_errno("ftruncate of shared memory to " + std::to_string(bytes) + " bytes");
  if (::fcntl(file.number, F_ADD_SEALS, kSeals) != 0) throw_errno("sealing the size of shared memory");
  const int descriptor = file.release();
  const auto segment = make_owned<Segment>(descriptor, bytes);
  segment->guard_.emplace(segment->base_, bytes, descriptor);
  return segment;
}

std::shared_ptr<Segment> Segment::attach(pid_t pid, int descriptor, std::size_t bytes, std::size_t writable) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  // Before it is opened: whatever else may lie there is left alone.
  if (target_of(path) != "/memfd:" + std::string(kName) + " (deleted)")
    throw std::runtime_error(path + " is not a segment of shared memory");
  Descriptor file{::open(path.c_str(), O_RDWR | O_CLOEXEC)};
  if (file.number < 0) throw_errno("open of " + path);
  struct stat status{};
  if (::fstat(file.number, &status) != 0) throw_errno("fstat of " + path);
  if (status.st_uid != ::geteuid() || (status.st_mode & 07777) != kMode)
    throw std::runtime_error(path + " belongs to another user, or others may write to it");
  if (static_cast<std::size_t>(status.st_size) != bytes || (::fcntl(file.number, F_GET_SEALS) & kSeals) != kSeals)
    throw std::runtime_error(path + " has another size than announced, or one that may change");
  const auto segment = make_owned<Segment>(file.release(), bytes);
  ::close(std::exchange(segment->descriptor_, -1));
  segment->guard_.emplace(segment->base_, bytes, -1);
  if (::mprotect(segment->base_ + writable, bytes - writable, PROT_READ) != 0) throw_errno("mprotect");
  return segment;
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
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > segment_->bytes()) throw OutOfSharedMemory(describe_lack(bytes));  // too large to round up, too
  const std::size_t needed = round_up(bytes, unit);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const std::size_t padding = round_up(it->first, unit) - it->first;
    if (it->second >= padding + needed && (best == free_.end() || it->second < best->second)) best = it;
  }
  if (best == free_.end()) throw OutOfSharedMemory(describe_lack(bytes));
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
  if (!owner_.here()) return;
  const Offset offset = static_cast<Offset>(address - segment_->base());
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = taken_.find(offset);
  if (it == taken_.end()) return;  // a peer has overwritten the table that named it
  const std::size_t bytes = it->second;
  taken_.erase(it);
  used_ -= bytes;
  if (bytes >= kReturnPagesFrom) ::madvise(address, bytes, MADV_REMOVE);
  insert_free(offset, bytes);
}

// REQUIRES: mutex_ held
std::string SharedHeap::describe_lack(std::size_t bytes) const {
  return "shm: no room for " + mebibytes(bytes) + ": each rank's shared memory holds " +
      mebibytes(segment_->bytes()) + ", of which " + mebibytes(used_) + " are in use here";
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
