#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

namespace pdctl {
namespace {

// Worker threads take no signals: those are for the interpreter's main thread.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

struct ThreadPool::Loop {
  Loop(size_t n, const std::function<void(size_t)>& f) : count(n), body(f) {}

  // Takes items until none is left; after an exception no new item is taken.
  void take() noexcept {
    for (size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      try {
        body(i);
      } catch (...) {
        next.store(count);
        const std::lock_guard<std::mutex> lock(mutex);
        if (!error) error = std::current_exception();
      }
    }
  }

  const size_t count;
  const std::function<void(size_t)>& body;
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
};

ThreadPool& ThreadPool::instance() {
  // Never destroyed: workers sleep on it until the process is gone. After a fork the parent's pool
  // may be locked for good, so that the child's copy is left alone.
  static std::mutex mutex;
  static ThreadPool* pool = nullptr;
  static pid_t owner = 0;
  static const int forks = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                                          [] { mutex.unlock(); });
  static_cast<void>(forks);
  const std::lock_guard<std::mutex> lock(mutex);
  if (pool == nullptr || owner != ::getpid()) {
    pool = new ThreadPool();
    owner = ::getpid();
  }
  return *pool;
}

void ThreadPool::grow(size_t workers) {
  const BlockSignals blocked;
  while (workers_ < workers) {
    try {
      std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      return;  // a thread limit: fewer threads give the same result
    }
    ++workers_;
  }
}

void ThreadPool::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return tickets_ > 0; });
    --tickets_;
    ++active_;
    Loop* loop = loop_;
    lock.unlock();
    loop->take();
    lock.lock();
    if (--active_ == 0) done_.notify_one();
  }
}

void ThreadPool::run(size_t count, size_t threads, const std::function<void(size_t)>& body) {
  Loop loop(count, body);
  const size_t helpers = std::min(threads, count) > 1 ? std::min(threads, count) - 1 : 0;
  const std::unique_lock<std::mutex> only(running_, std::try_to_lock);
  if (helpers > 0 && only.owns_lock()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      loop_ = &loop;
      tickets_ = std::min(helpers, workers_);
    }
    wake_.notify_all();
    loop.take();
    std::unique_lock<std::mutex> lock(mutex_);
    tickets_ = 0;
    done_.wait(lock, [this] { return active_ == 0; });
    loop_ = nullptr;
  } else {
    loop.take();
  }
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace pdctl
