#include <cstdint>
#include <limits>

#include "lse.h"
#include "pool.h"
#include "spans.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "logprob.inc"

namespace {

constexpr double kAtanh[] = {1.0,        1.0 / 3.0,  1.0 / 5.0,  1.0 / 7.0,  1.0 / 9.0, 1.0 / 11.0,
                             1.0 / 13.0, 1.0 / 15.0, 1.0 / 17.0, 1.0 / 19.0, 1.0 / 21.0};

// ln m for m in [1/sqrt 2, sqrt 2]: 2 atanh((m - 1) / (m + 1)) by eleven terms of its series.
double log_near_one(double m) {
  double f = (m - 1.0) / (m + 1.0);
  double square = f * f;
  double series = kAtanh[10];
  for (int k = 9; k >= 0; --k) series = series * square + kAtanh[k];
  return (2.0 * f) * series;
}

}  // namespace

double lse64(const LseState& state) {
  if (state.top < -kTopLimit) return -std::numeric_limits<double>::infinity();
  if (state.top >= kTopLimit) return std::numeric_limits<double>::quiet_NaN();
  double total = static_cast<double>(state.sum[0]);
  for (int k = 1; k < kWindows; ++k) total = total * 0x1p+16 + static_cast<double>(state.sum[k]);
  uint64_t bits;
  std::memcpy(&bits, &total, 8);
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  bits = (bits & ((uint64_t{1} << 52) - 1)) | (uint64_t{1023} << 52);
  double m;
  std::memcpy(&m, &bits, 8);
  if (m > 0x1.6a09e667f3bcdp+0) { m = m * 0.5; ++exponent; }
  exponent += 16 * (state.top - (kWindows - 1)) - 23;
  return static_cast<double>(exponent) * 0x1.62e42fefa39efp-1 + log_near_one(m);
}

float log_probability(double lse, float z) {
  float logp = static_cast<float>(static_cast<double>(z) - lse);
  bool defined = logp == logp && lse - lse == 0.0;
  return !defined ? bits_to_float(0x7fc00000u) : logp > 0.0f ? 0.0f : logp;
}

void lse_states(const float* logits, int64_t stride, int64_t rows, int64_t columns, const float* temperatures,
                float temperature, int64_t* states) {
  Spans spans(logits, stride, rows, columns, {temperatures, temperature});
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) store_state(spans.whole(r), states + r * 5);
  });
}

void lse_finish(const int64_t* states, float* lse, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    double value = lse64(load_state(states + r * 5));
    lse[r] = value == value ? static_cast<float>(value) : bits_to_float(0x7fc00000u);
  }
}

void logp_finish(const int64_t* states, const float* z, float* logp, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r) {
    double lse = lse64(load_state(states + r * 5));
    for (int64_t j = 0; j < n; ++j) logp[r * n + j] = log_probability(lse, z[r * n + j]);
  }
}

void logprob(const float* logits, int64_t stride, int64_t rows, int64_t columns, const int64_t* targets, int64_t n,
             const float* temperatures, float temperature, float* logp) {
  Spans spans(logits, stride, rows, columns, {temperatures, temperature});
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      double lse = lse64(spans.whole(r));
      for (int64_t j = 0; j < n; ++j) {
        int64_t target = targets[r * n + j];
        bool known = target >= 0 && target < columns;
        logp[r * n + j] = known ? log_probability(lse, spans.row(r).one(target)) : 0.0f;
      }
    }
  });
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
