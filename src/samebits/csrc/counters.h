// Evidence that a kernel ran: each binding advances its own counter in the call that launches the kernel.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

namespace samebits {

class Counter {
 public:
  explicit Counter(const char* name) { registry()[name] = this; }
  void bump() { calls_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  static std::map<std::string, Counter*>& registry() {
    static std::map<std::string, Counter*> all;
    return all;
  }

 private:
  std::atomic<uint64_t> calls_{0};
};

}  // namespace samebits
