// Sums of integer terms as one exact integer, in units of a row's lowest kept window.
#pragma once

#include "lse.h"

namespace samebits {
namespace SAMEBITS_ISA {

using Wide = unsigned __int128;

// The sum of a part of a row whose highest window is `top`.
inline Wide weight_of(LseState part, int64_t top) {
  part.raise(top);
  Wide sum = 0;
  for (int64_t window : part.sum) sum = (sum << 16) + static_cast<uint64_t>(window);
  return sum;
}

// One term, q * 2^(i - 23); 0 where its window was dropped.
inline Wide weight_of_term(int32_t q, int32_t i, int64_t top) {
  int64_t lowest = (top - (kWindows - 1)) << kWindowShift;
  int64_t shift = i - lowest;
  return shift < 0 ? 0 : static_cast<Wide>(static_cast<uint32_t>(q)) << shift;
}

// floor(sum * bits / 2^64)
inline Wide scale(Wide sum, uint64_t bits) {
  uint64_t high = static_cast<uint64_t>(sum >> 64), low = static_cast<uint64_t>(sum);
  return static_cast<Wide>(high) * bits + ((static_cast<Wide>(low) * bits) >> 64);
}

// ceil(sum * bits / 2^64)
inline Wide scale_up(Wide sum, uint64_t bits) {
  uint64_t rest = static_cast<uint64_t>(sum) * bits;  // modulo 2^64: what scale() drops
  return scale(sum, bits) + (rest ? 1 : 0);
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
