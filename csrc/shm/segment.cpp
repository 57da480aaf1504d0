#include "segment.h"

#include <cerrno>
#include <fcntl.h>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace minddp::shm {

namespace {

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

// "" if the link cannot be read.
std::string target_of(const std::string& path) {
  char target[256] = {};
  return ::readlink(path.c_str(), target, sizeof(target) - 1) > 0 ? target : "";
}

}  // namespace

Segment::Segment(int descriptor, std::size_t bytes) : descriptor_(descriptor), bytes_(bytes) {
  Descriptor file{descriptor};
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (base == MAP_FAILED) throw_errno("mmap of " + std::to_string(bytes) + " bytes of shared memory");
  base_ = static_cast<char*>(base);
  ::madvise(base_, bytes, MADV_DONTDUMP);
  if (::madvise(base_, bytes, MADV_DONTFORK) != 0) {
    const int error = std::exchange(errno, ::munmap(base_, bytes));
    errno = error;
    throw_errno("madvise of shared memory");
  }
  file.release();
}

Segment::~Segment() {
  close();
  ::munmap(base_, bytes_);
}

void Segment::close() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

std::shared_ptr<Segment> Segment::create(std::size_t bytes) {
  Descriptor file{::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (file.number < 0) throw_errno("memfd_create");
  if (::fchmod(file.number, kMode) != 0) throw_errno("fchmod of shared memory");
  if (::ftruncate(file.number, static_cast<off_t>(bytes)) != 0)
    throw_errno("ftruncate of shared memory to " + std::to_string(bytes) + " bytes");
  if (::fcntl(file.number, F_ADD_SEALS, kSeals) != 0) throw_errno("sealing the size of shared memory");
  return make_owned<Segment>(file.release(), bytes);
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
    throw std::runtime_error(path + " has another size than this rank's segment, or one that may change");
  const auto segment = make_owned<Segment>(file.release(), bytes);
  segment->close();
  if (::mprotect(segment->base_ + writable, bytes - writable, PROT_READ) != 0) throw_errno("mprotect");
  return segment;
}

}  // namespace minddp::shm
