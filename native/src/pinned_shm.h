// Pinned POSIX shared memory: create exclusively, open, free. Knows names and bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace pdctl {

// A failed system call; becomes Python's OSError, whose subclass follows from the number.
class SystemError : public std::runtime_error {
 public:
  SystemError(int number, const std::string& message)
      : std::runtime_error(message), number_(number) {}
  int number() const { return number_; }

 private:
  int number_;
};

enum class PageLock { kNone, kMlock, kCuda };

// One mapping of one segment. The destructor unmaps and never unlinks.
class PinnedShm {
 public:
  // Both throw SystemError, and std::invalid_argument on a bad name or size; then nothing is left.
  static PinnedShm create(const std::string& name, size_t nbytes);
  static PinnedShm open(const std::string& name, size_t nbytes);

  PinnedShm(PinnedShm&& other) noexcept;
  PinnedShm& operator=(PinnedShm&&) = delete;
  ~PinnedShm() { unmap(); }

  // Idempotent, from any thread. Throws SystemError when the name exists and cannot be removed.
  void free(bool unlink);

  const std::string& name() const { return name_; }
  size_t nbytes() const { return nbytes_; }
  PageLock lock() const { return address() == nullptr ? PageLock::kNone : lock_; }
  void* address() const { return address_.load(); }  // null once freed

 private:
  PinnedShm(std::string name, size_t nbytes) : name_(std::move(name)), nbytes_(nbytes) {}
  void map(int fd);
  void unmap() noexcept;

  std::string name_;
  size_t nbytes_;
  std::atomic<void*> address_{nullptr};  // whoever takes it unmaps: free may race with free
  PageLock lock_ = PageLock::kNone;
};

}  // namespace pdctl
