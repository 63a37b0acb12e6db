// For tests: owned primitives over (a part of) all 2^32 fp32 inputs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "pool.h"
#include "primitives.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "arithmetic.inc"
#include "primitives.inc"

namespace {

constexpr int64_t kBlock = 4096, kBlocks = (int64_t{1} << 32) / kBlock;
enum Which { kExp2, kSigmoid, kSqrt, kRoundBf16, kReciprocal, kQuotient, kLog };

struct Found {
  uint64_t digest = 0, decreases = 0;
  double error = -1.0, largest_decrease = 0.0;
  uint32_t worst = 0;

  void note(double new_error, uint32_t pattern) {
    if (new_error < error || (new_error == error && pattern >= worst)) return;
    error = new_error;
    worst = pattern;
  }
  void add(const Found& part) {
    digest += part.digest;
    decreases += part.decreases;
    largest_decrease = std::max(largest_decrease, part.largest_decrease);
    note(part.error, part.worst);
  }
};

double exact(int which, double x) {
  switch (which) {
    case kExp2: return std::exp2(x);
    case kSigmoid: return 1.0 / (1.0 + std::exp(-x));
    case kSqrt: return std::sqrt(x);
    case kReciprocal: return 1.0 / x;
    case kQuotient: return x / static_cast<double>(0.7f);
    case kLog: return x > 0.0 && x < INFINITY ? std::log(x) : NAN;
    default: return x;
  }
}

// The last place of a value in a format with `fraction` bits and fp32's exponents.
double last_place(double value, int fraction) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  int64_t exponent = static_cast<int64_t>((bits >> 52) & 0x7ff) - 1023;
  bits = static_cast<uint64_t>(std::min<int64_t>(std::max<int64_t>(exponent, -126), 127) - fraction + 1023) << 52;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// The error of y in the units of the promise: the last place of the exact result, for the sigmoid times max(1, |x|),
// and never less than 2^-126 there.
double error_of(int which, double x, double y, double want) {
  if (std::isnan(want) || y == want) return std::isnan(want) == std::isnan(y) ? 0.0 : INFINITY;
  int fraction = which == kRoundBf16 ? 7 : 23;
  if (std::isinf(y)) {  // right from the largest number plus half a unit on
    bool beyond = std::fabs(want) >= 0x1p128 - last_place(0x1p127, fraction) / 2;
    return beyond && std::signbit(y) == std::signbit(want) ? 0.0 : INFINITY;
  }
  double unit = last_place(want, fraction);
  if (which == kSigmoid) unit = std::max(unit * std::max(1.0, std::fabs(x)), 0x1p-126);
  return std::fabs(y - want) / unit;
}

Found sweep_block(int which, uint32_t first) {
  Found found;
  float x[kBlock], y[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) x[i] = bits_to_float(first + static_cast<uint32_t>(i));
  primitive(which, x, y, kBlock);
  float rising = (first >> 31) != 0 ? -1.0f : 1.0f;  // the values of ascending negative patterns descend
  if (which == kReciprocal) rising = -rising;
  for (int64_t i = 0; i < kBlock; ++i) {
    uint32_t pattern = first + static_cast<uint32_t>(i), bits = float_to_bits(y[i]);
    if (which == kRoundBf16) bits >>= 16;
    found.digest += static_cast<uint64_t>(bits) * (2 * static_cast<uint64_t>(pattern) + 1);
    found.note(error_of(which, x[i], y[i], exact(which, x[i])), pattern);
    if (i == 0 || !((y[i] - y[i - 1]) * rising < 0.0f)) continue;
    ++found.decreases;
    double drop = std::fabs(static_cast<double>(y[i]) - y[i - 1]);
    found.largest_decrease = std::max(found.largest_decrease, drop / last_place(std::min(y[i], y[i - 1]), 23));
  }
  return found;
}

}  // namespace

void sweep(int which, int64_t first, int64_t step, uint64_t* digest, double* error, uint32_t* worst,
           uint64_t* decreases, double* largest_decrease) {
  Found total;
  std::mutex one_at_a_time;
  parallel_for((kBlocks - first + step - 1) / step, 64, [&](int64_t begin, int64_t end) {
    Found part;
    for (int64_t b = begin; b < end; ++b)
      part.add(sweep_block(which, static_cast<uint32_t>((first + b * step) * kBlock)));
    std::lock_guard<std::mutex> lock(one_at_a_time);
    total.add(part);
  });
  *digest = total.digest;
  *error = total.error;
  *worst = total.worst;
  *decreases = total.decreases;
  *largest_decrease = total.largest_decrease;
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
