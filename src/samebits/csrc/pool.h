// A small pool of threads that splits an index range. Which thread takes which part never touches bits:
// kernels give every output element to exactly one call, whatever the number of threads.
#pragma once

#include <cstdint>
#include <functional>

namespace samebits {

// Calls body(begin, end) over a partition of [0, n); parts hold at least `grain` items. Blocks until done.
void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

void set_threads(int n);
int threads();

}  // namespace samebits
