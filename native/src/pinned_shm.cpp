#include "pinned_shm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "cuda_host.h"

namespace pdctl {
namespace {

constexpr size_t kMaxName = 254;
constexpr off_t kReserveStep = off_t{64} << 20;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// Removes a name that was just made, unless told to keep it.
class UnlinkGuard {
 public:
  explicit UnlinkGuard(std::string path) : path_(std::move(path)) {}
  ~UnlinkGuard() {
    if (armed_) ::shm_unlink(path_.c_str());
  }
  UnlinkGuard(const UnlinkGuard&) = delete;
  UnlinkGuard& operator=(const UnlinkGuard&) = delete;
  void disarm() { armed_ = false; }

 private:
  std::string path_;
  bool armed_ = true;
};

[[noreturn]] void fail(int number, const std::string& name, const std::string& what) {
  throw SystemError(number, "shared memory segment " + name + ": " + what);
}

std::string text_of(int number) { return std::strerror(number); }

std::string shm_path(const std::string& name, size_t nbytes) {
  if (name.empty() || name == "." || name == ".." || name.size() > kMaxName ||
      name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
    throw std::invalid_argument("shared memory segment name '" + name +
                                "' must be 1 to 254 characters without a slash");
  }
  if (nbytes == 0 || nbytes > static_cast<size_t>(std::numeric_limits<off_t>::max())) {
    throw std::invalid_argument("shared memory segment " + name + ": cannot have " +
                                std::to_string(nbytes) + " bytes");
  }
  return "/" + name;
}

[[noreturn]] void fail_no_space(int fd, const std::string& name, size_t nbytes, int number) {
  struct statvfs info {};
  std::string free = "unknown";
  if (::fstatvfs(fd, &info) == 0) {
    free = std::to_string(static_cast<uint64_t>(info.f_bavail) * info.f_frsize);
  }
  fail(number, name,
       "cannot reserve " + std::to_string(nbytes) + " bytes in /dev/shm, which has " + free +
           " free: " + text_of(number));
}

// False when the file system says that it has too little; one without a limit never does. Asking
// first spares others a /dev/shm that is full for the moment a doomed reservation takes.
bool may_fit(int fd, size_t nbytes) {
  struct statvfs info {};
  if (::fstatvfs(fd, &info) != 0 || info.f_blocks == 0) return true;
  return static_cast<uint64_t>(info.f_bavail) * info.f_frsize >= nbytes;
}

// Takes the space now: a mapping of a sparse file would end in SIGBUS at first touch when /dev/shm
// turns out to be full. In steps, so that a signal costs one step and not the whole.
void reserve(int fd, const std::string& name, size_t nbytes) {
  if (!may_fit(fd, nbytes)) fail_no_space(fd, name, nbytes, ENOSPC);
  const off_t end = static_cast<off_t>(nbytes);
  for (off_t at = 0; at < end;) {
    const off_t step = std::min(kReserveStep, end - at);
    const int number = ::posix_fallocate(fd, at, step);
    if (number == EINTR) continue;
    if (number != 0) fail_no_space(fd, name, nbytes, number);
    at += step;
  }
}

}  // namespace

PinnedShm PinnedShm::create(const std::string& name, size_t nbytes) {
  const std::string path = shm_path(name, nbytes);
  const Descriptor fd(::shm_open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (fd.get() < 0) {
    fail(errno, name, "cannot create " + std::to_string(nbytes) + " bytes: " + text_of(errno));
  }
  UnlinkGuard guard(path);
  // The umask can only have narrowed the mode; it must not keep the owner out.
  if (::fchmod(fd.get(), 0600) != 0) fail(errno, name, "cannot set its mode: " + text_of(errno));
  reserve(fd.get(), name, nbytes);
  PinnedShm shm(name, nbytes);
  shm.map(fd.get());
  guard.disarm();
  return shm;
}

PinnedShm PinnedShm::open(const std::string& name, size_t nbytes) {
  const std::string path = shm_path(name, nbytes);
  const Descriptor fd(::shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (fd.get() < 0) fail(errno, name, "cannot open: " + text_of(errno));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) fail(errno, name, "cannot stat: " + text_of(errno));
  if (static_cast<size_t>(info.st_size) != nbytes) {
    fail(EINVAL, name,
         "has " + std::to_string(info.st_size) + " bytes, not " + std::to_string(nbytes));
  }
  PinnedShm shm(name, nbytes);
  shm.map(fd.get());
  return shm;
}

PinnedShm::PinnedShm(PinnedShm&& other) noexcept
    : name_(std::move(other.name_)),
      nbytes_(other.nbytes_),
      address_(other.address_.exchange(nullptr)),
      lock_(other.lock_) {}

void PinnedShm::map(int fd) {
  // MAP_POPULATE: the first request must not pay for page faults.
  void* address =
      ::mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (address == MAP_FAILED) {
    fail(errno, name_, "cannot map " + std::to_string(nbytes_) + " bytes: " + text_of(errno));
  }
  address_ = address;
  std::string error;
  switch (cuda_register(address, nbytes_, &error)) {
    case CudaHost::kRegistered:
      lock_ = PageLock::kCuda;
      return;
    case CudaHost::kFailed:
      fail(ENOMEM, name_,
           "cannot register " + std::to_string(nbytes_) + " bytes with the GPU driver: " + error);
    case CudaHost::kAbsent:
      // Best effort: without a GPU a page that moves costs time, never correctness.
      if (::mlock(address, nbytes_) == 0) lock_ = PageLock::kMlock;
  }
}

void PinnedShm::unmap() noexcept {
  void* address = address_.exchange(nullptr);
  if (address == nullptr) return;
  if (lock_ == PageLock::kCuda) cuda_unregister(address);
  ::munmap(address, nbytes_);  // also undoes mlock
}

void PinnedShm::free(bool unlink) {
  unmap();
  if (!unlink) return;
  if (::shm_unlink(("/" + name_).c_str()) != 0 && errno != ENOENT) {
    fail(errno, name_, "cannot unlink: " + text_of(errno));
  }
}

}  // namespace pdctl
