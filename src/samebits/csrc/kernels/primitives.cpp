#include "primitives.h"

#include <cmath>
#include <cstdint>

namespace samebits {
namespace SAMEBITS_ISA {
#include "primitives.inc"

namespace {

F32x16 square_root(F32x16 v) {
  float t[kLanes];
  v.store(t);
  for (float& e : t) e = std::sqrt(e);
  return keep_nan(F32x16::load(t), F32x16::load(t));
}

F32x16 through_bf16(F32x16 v) {
  uint16_t t[kLanes];
  v.store_bf16(t);
  return F32x16::load_bf16(t);
}

}  // namespace

void primitive(int which, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    int part = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    F32x16 v = load_part(x + i, part);
    F32x16 out = which == 0 ? exp2(v) : which == 1 ? sigmoid(v) : which == 2 ? square_root(v) : through_bf16(v);
    store_part(out, y + i, part);
  }
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
