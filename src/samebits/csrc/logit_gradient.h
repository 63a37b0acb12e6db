// The gradient of a log-probability with respect to the logits of its row.
#pragma once

#include <algorithm>

#include "lse.h"

namespace samebits {
namespace SAMEBITS_ISA {

// One row of logit gradients: upstream * (onehot - 2^((z - lse) log2 e)) / temperature, rounded to bf16.
// `target` counts from the row's first column and may lie outside.
inline void gradient_row(const Scaled& row, int64_t n, int64_t target, float upstream, float lse, uint16_t* dz) {
  const F32x16 log2e = F32x16::all(0x1.715476p+0f), g = F32x16::all(upstream), total = F32x16::all(lse);
  const F32x16 temperature = F32x16::all(row.temperature);
  for (int64_t j = 0; j < n; j += kLanes) {
    int part = static_cast<int>(std::min<int64_t>(kLanes, n - j));
    float onehot[kLanes] = {};
    if (target >= j && target < j + kLanes) onehot[target - j] = 1.0f;
    F32x16 probability = exp2((row.at(j, part) - total) * log2e);
    F32x16 gradient = g * (F32x16::load(onehot) - probability);
    store_part_bf16(row.temperature == 1.0f ? gradient : gradient / temperature, dz + j, part);
  }
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
