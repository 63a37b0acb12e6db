#include "lse.h"
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

// The logarithm that the log-sum-exp ends with, of a sum of one term; NaN for what is no sum.
F32x16 logarithm(F32x16 v) {
  float t[kLanes];
  v.store(t);
  for (float& e : t) {
    if (!(e > 0.0f) || e > 0x1.fffffep+127f) { e = bits_to_float(0x7fc00000u); continue; }
    uint32_t bits = float_to_bits(e);
    int64_t significand = bits & 0x7fffff, exponent = bits >> 23;
    if (exponent > 0) significand |= 0x800000; else exponent = 1;
    LseState state;
    state.top = (exponent - 127) >> kWindowShift;
    state.sum[0] = significand << ((exponent - 127) & 15);
    e = static_cast<float>(lse64(state));
  }
  return F32x16::load(t);
}

F32x16 quotient(F32x16 a, F32x16 b) {
  F32x16 q = a / b;
  return keep_nan(q, q);
}

F32x16 apply(int which, F32x16 v) {
  switch (which) {
    case 0: return exp2(v);
    case 1: return sigmoid(v);
    case 2: return square_root(v);
    case 3: return through_bf16(v);
    case 4: return quotient(F32x16::all(1.0f), v);
    case 5: return quotient(v, F32x16::all(0.7f));
    default: return logarithm(v);
  }
}

}  // namespace

void primitive(int which, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    int part = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    store_part(apply(which, load_part(x + i, part)), y + i, part);
  }
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
