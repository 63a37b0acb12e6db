// The owned dot product over 128 lanes; arithmetic/primitives.py has its readable form.
#pragma once

#include <cstdint>

#include "vec.h"

namespace samebits {
namespace SAMEBITS_ISA {

// Lane j sums the products a[i] * b[i] with i = j (mod 128), i ascending, by fma; then the lanes fold in halves.
// left(i, n) and right(i, n) give the n <= 16 elements from i on.
template <class Left, class Right>
float lane_dot(int64_t width, Left left, Right right) {
  constexpr int kVectors = 8;  // of 16 lanes
  F32x16 acc[kVectors];
  for (F32x16& a : acc) a = F32x16::zero();
  for (int64_t i = 0; i < width; i += kLanes * kVectors)
    for (int v = 0; v < kVectors; ++v) {
      int64_t at = i + v * kLanes;
      if (at >= width) break;
      int part = static_cast<int>(width - at < kLanes ? width - at : kLanes);
      acc[v] = fma(left(at, part), right(at, part), acc[v]);
    }
  for (int half = kVectors / 2; half > 0; half /= 2)
    for (int v = 0; v < half; ++v) acc[v] = acc[v] + acc[v + half];
  return fold(acc[0]);
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
