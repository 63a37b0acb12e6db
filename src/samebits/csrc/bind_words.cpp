// Words in memory that processes share: a store that publishes what was written before it, and a wait for it.
//
// One process writes a word, the others only read it. A waiter spins for as long as an answer from a running peer
// takes, then sleeps in the kernel, so that ranks that outnumber the cores do not steal each other's time.
#include <algorithm>
#include <atomic>
#include <chrono>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#else
#include <thread>
#endif

#include "bind.h"

namespace samebits {
namespace {

using Word = std::atomic<uint64_t>;
using Clock = std::chrono::steady_clock;
static_assert(Word::is_always_lock_free && sizeof(Word) == sizeof(uint64_t));

constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#ifdef __linux__
// The kernel compares 32 bits: the low half, which every store of a counter changes.
uint32_t* low_half(Word* word) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of a word must come first");
  return reinterpret_cast<uint32_t*>(word);
}

void wake(Word* word) { syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

void sleep_while(Word* word, uint64_t seen, std::chrono::nanoseconds longest) {
  timespec limit{static_cast<time_t>(longest.count() / 1000000000), static_cast<long>(longest.count() % 1000000000)};
  syscall(SYS_futex, low_half(word), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
}
#else
void wake(Word*) {}

void sleep_while(Word*, uint64_t, std::chrono::nanoseconds longest) {
  std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(longest, std::chrono::microseconds(50)));
}
#endif

void store(Address address, uint64_t value) {
  Word* word = at<Word>(address);
  word->store(value, std::memory_order_release);
  wake(word);
}

// Whether the word came to at least `value` within `microseconds`.
bool reaches(Address address, uint64_t value, int64_t microseconds) {
  Word* word = at<Word>(address);
  for (int i = 0; i < kSpins; ++i) {
    if (word->load(std::memory_order_acquire) >= value) return true;
    relax();
  }
  const auto end = Clock::now() + std::chrono::microseconds(microseconds);
  for (;;) {
    const uint64_t seen = word->load(std::memory_order_acquire);
    if (seen >= value) return true;
    const auto left = end - Clock::now();
    if (left <= Clock::duration::zero()) return false;
    sleep_while(word, seen, left);
  }
}

}  // namespace

void bind_words(nb::module_& m) {
  m.def("word_store", &store, Release());
  m.def("word_load", [](Address address) { return at<Word>(address)->load(std::memory_order_acquire); });
  m.def("word_reaches", &reaches, Release());
}

}  // namespace samebits
