// The owned primitives: fixed sequences of IEEE operations, equal on every machine.
// The readable definitions are in samebits/arithmetic/primitives.py.
#pragma once

#include "vec.h"

namespace samebits {
namespace SAMEBITS_ISA {

// 2^r for r in [-1/2, 1/2]: Horner's rule with fma; the constant term is exactly 1.
inline F32x16 exp2_core(F32x16 r) {
  F32x16 p = F32x16::all(0x1.44138ap-13f);
  p = fma(p, r, F32x16::all(0x1.5f0890p-10f));
  p = fma(p, r, F32x16::all(0x1.3b2a54p-7f));
  p = fma(p, r, F32x16::all(0x1.c6af6cp-5f));
  p = fma(p, r, F32x16::all(0x1.ebfbe0p-3f));
  p = fma(p, r, F32x16::all(0x1.62e430p-1f));
  return fma(p, r, F32x16::all(1.0f));
}

// exp2 over all of fp32: gradual underflow, +inf above 128, NaN for NaN.
inline F32x16 exp2(F32x16 t) {
#if defined(SAMEBITS_ISA_avx512)
  return keep_nan(scaled(exp2_core(fraction(t)), nearest(t)), t);
#else
  F32x16 c = max(min(t, F32x16::all(129.0f)), F32x16::all(-152.0f));
  F32x16 n = nearest(c);
  F32x16 p = exp2_core(c - n);
  // two factors, so that neither leaves the range of normal powers of two; the first product is exact
  F32x16 half = nearest(n * F32x16::all(0.5f));
  return keep_nan(p * power_of_two(half) * power_of_two(n - half), t);
#endif
}

inline F32x16 sigmoid(F32x16 x) {
  F32x16 one = F32x16::all(1.0f);
  return one / (one + exp2(x * F32x16::all(-0x1.715476p+0f)));
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
