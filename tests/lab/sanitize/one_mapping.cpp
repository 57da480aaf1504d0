// In the place of mmap, munmap and mprotect where the transport calls them (the linker's --wrap): a file of shared
// memory is mapped once in this process, whoever asks, and stays writable, since one of those is its owner.
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>
#include <utility>

extern "C" {
void* __real_mmap(void* address, size_t bytes, int protection, int flags, int descriptor, off_t offset);
int __real_munmap(void* address, size_t bytes);
int __real_mprotect(void* address, size_t bytes, int protection);
}

namespace {

using File = std::pair<dev_t, ino_t>;
struct Mapping {
  void* base;
  size_t bytes;
  int users;
};

std::mutex mutex;
std::map<File, Mapping>& mappings = *new std::map<File, Mapping>;  // GUARDED_BY(mutex)

auto find(void* address) {
  auto it = mappings.begin();
  const auto within = [&](const Mapping& m) {
    return address >= m.base && address < static_cast<char*>(m.base) + m.bytes;
  };
  while (it != mappings.end() && !within(it->second)) ++it;
  return it;
}

}  // namespace

extern "C" void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int descriptor, off_t offset) {
  struct stat status{};
  if ((flags & MAP_SHARED) == 0 || descriptor < 0 || ::fstat(descriptor, &status) != 0)
    return __real_mmap(address, bytes, protection, flags, descriptor, offset);
  const std::lock_guard<std::mutex> lock(mutex);
  const File file{status.st_dev, status.st_ino};
  const auto it = mappings.find(file);
  if (it != mappings.end()) {
    ++it->second.users;
    return it->second.base;
  }
  void* base = __real_mmap(address, bytes, protection, flags, descriptor, offset);
  if (base != MAP_FAILED) mappings[file] = {base, bytes, 1};
  return base;
}

extern "C" int __wrap_munmap(void* address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto it = find(address);
  if (it == mappings.end()) return __real_munmap(address, bytes);
  if (--it->second.users > 0) return 0;
  mappings.erase(it);
  return __real_munmap(address, bytes);
}

extern "C" int __wrap_mprotect(void* address, size_t bytes, int protection) {
  const std::lock_guard<std::mutex> lock(mutex);
  return find(address) != mappings.end() ? 0 : __real_mprotect(address, bytes, protection);
}
