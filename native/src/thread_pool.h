// A few sleeping threads for short parallel loops. One loop at a time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>

namespace pdctl {

class ThreadPool {
 public:
  // This process's pool. A forked child gets its own: threads do not survive a fork.
  static ThreadPool& instance();

  // Calls body(0 .. count-1), each once, on at most `threads` threads of which the caller is one.
  // Returns when all calls have; rethrows the first exception. A second loop at the same time runs
  // on its caller alone.
  void run(size_t count, size_t threads, const std::function<void(size_t)>& body);

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

 private:
  struct Loop;

  ThreadPool() = default;
  void grow(size_t workers);
  void work();

  std::mutex running_;  // held by the one loop
  std::mutex mutex_;    // guards all below
  std::condition_variable wake_;
  std::condition_variable done_;
  Loop* loop_ = nullptr;
  size_t tickets_ = 0;  // workers that may still join the loop
  size_t active_ = 0;   // workers in the loop
  size_t workers_ = 0;
};

}  // namespace pdctl
