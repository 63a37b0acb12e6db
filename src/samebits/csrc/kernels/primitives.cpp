#include "primitives.h"

#include <cstdint>

namespace samebits {
namespace SAMEBITS_ISA {
#include "primitives.inc"

void primitive(int which, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    int part = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    F32x16 v = load_part(x + i, part);
    store_part(which == 0 ? exp2(v) : sigmoid(v), y + i, part);
  }
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
