#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace samebits {
namespace {

// Taken when the library loads: a host program may pin its own thread to one core later, and threads
// created after that would inherit the pin and share that core.
cpu_set_t allowed_at_load() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  return set;
}
const cpu_set_t kAllowed = allowed_at_load();

// Subnormals are part of the arithmetic: a host that flushes them must not change our bits.
class IeeeMode {
 public:
#if defined(__x86_64__)
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Pool {
  static constexpr int kSpins = 4000;  // some microseconds
  static constexpr int kPatience = 20 * kSpins;  // about the time slice that another process may take

 public:
  explicit Pool(int n) : size_(n) {
    for (int i = 1; i < n; ++i) workers_.emplace_back([this, i] { serve(i); });
  }
  ~Pool() {
    stop_ = true;
    publish();
    for (std::thread& t : workers_) t.join();
  }
  int size() const { return size_; }

  void run(int parts, const std::function<void(int)>& part) {
    part_ = &part;
    parts_ = parts;
    pending_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    publish();
    part(0);
    // on a busy machine a worker may need this core to finish
    for (int i = 0; pending_.load(std::memory_order_acquire) > 0; ++i)
      if (i < kPatience) pause_briefly(); else sched_yield();
  }

 private:
  void publish() {
    { std::lock_guard<std::mutex> lock(mutex_); generation_.fetch_add(1, std::memory_order_release); }
    wake_.notify_all();
  }
  void serve(int index) {
    sched_setaffinity(0, sizeof kAllowed, &kAllowed);
    uint64_t seen = 0;
    for (;;) {
      // spin for some microseconds, since layers follow each other closely, then sleep
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) pause_briefly();
      if (generation_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
      }
      seen = generation_.load(std::memory_order_acquire);
      if (stop_) return;
      if (index < parts_) { IeeeMode mode; (*part_)(index); }
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  int size_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> pending_{0};
  std::atomic<bool> stop_{false};
  const std::function<void(int)>* part_ = nullptr;
  int parts_ = 0;
};

std::mutex pool_mutex;
Pool* pool = nullptr;
int wanted = 0;

int default_threads() { return std::max(1, CPU_COUNT(&kAllowed)); }

// A forked child has the object but not the threads.
void forget_pool() { pool = nullptr; new (&pool_mutex) std::mutex; }
const int kAtFork = pthread_atfork(nullptr, nullptr, forget_pool);

}  // namespace

int threads() { return wanted > 0 ? wanted : default_threads(); }

void set_threads(int n) {
  std::lock_guard<std::mutex> lock(pool_mutex);
  wanted = n;
  delete pool;
  pool = nullptr;
}

void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  IeeeMode mode;
  int64_t parts = std::min<int64_t>(threads(), std::max<int64_t>(1, n / std::max<int64_t>(1, grain)));
  if (parts <= 1) return body(0, n);
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (!pool) pool = new Pool(threads());
  parts = std::min<int64_t>(parts, pool->size());
  pool->run(static_cast<int>(parts), [&](int i) { body(n * i / parts, n * (i + 1) / parts); });
}

}  // namespace samebits
