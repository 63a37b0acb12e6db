// The order-free log-sum-exp: each logit becomes an integer q at an exponent i (the term q * 2^(i - 23)), and
// terms add up in 64-bit integers, one for each of the four highest windows of 16 exponents. The readable
// definition is samebits/ops/logprob/reference.py.
#pragma once

#include <vector>

#include "primitives.h"

namespace samebits {
namespace SAMEBITS_ISA {

constexpr int kWindows = 4;
constexpr int kWindowShift = 4;  // windows of 16 exponents
constexpr int64_t kEmptyTop = -(int64_t{1} << 27);
constexpr int64_t kTopLimit = int64_t{1} << 25;  // rows beyond it have no finite log-sum-exp
constexpr int64_t kNoTarget = -1;

// The state of a row; in memory five int64, the top window first.
struct LseState {
  int64_t top = kEmptyTop;
  int64_t sum[kWindows] = {};

  // Count the windows from a higher one; the lowest are dropped.
  void raise(int64_t to) {
    int64_t by = to - top;
    if (by <= 0) return;
    top = to;
    for (int k = kWindows - 1; k >= 0; --k) sum[k] = k >= by ? sum[k - by] : 0;
  }
  void merge(LseState other) {
    raise(other.top);
    other.raise(top);
    for (int k = 0; k < kWindows; ++k) sum[k] += other.sum[k];
  }
  bool finite() const { return top >= -kTopLimit && top < kTopLimit; }
};
inline LseState load_state(const int64_t* p) {
  LseState state;
  state.top = p[0];
  for (int k = 0; k < kWindows; ++k) state.sum[k] = p[1 + k];
  return state;
}
inline void store_state(const LseState& state, int64_t* p) {
  p[0] = state.top;
  for (int k = 0; k < kWindows; ++k) p[1 + k] = state.sum[k];
}

// The integer terms of up to kBlock logits.
constexpr int kBlock = 512;
struct Terms {
  alignas(64) int32_t q[kBlock];
  alignas(64) int32_t i[kBlock];
};

// 2^(z log2 e) = p * 2^n with p in [0.707, 1.415]; z beyond the limits (and NaN, upwards) ends at n = +-2^30.
inline void split_exponential(F32x16 z, F32x16& p, F32x16& n) {
  const F32x16 limit = F32x16::all(0x1p+30f), half = F32x16::all(0.5f), log2e = F32x16::all(0x1.715476p+0f);
  n = nearest(max(min(z * log2e, limit), F32x16::all(-0x1p+30f)));
  F32x16 r = fma(z, log2e, F32x16::zero() - n);
  r = fma(z, F32x16::all(0x1.4ae0c0p-26f), r);
  p = exp2_core(max(min(r, half), F32x16::all(-0.5f)));
}

#if defined(SAMEBITS_ISA_avx512)

inline void store_terms(F32x16 p, F32x16 n, int32_t* q, int32_t* i) {
  __m512i bits = _mm512_castps_si512(p.v);
  __m512i significand = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffff));
  _mm512_store_si512(q, _mm512_or_si512(significand, _mm512_set1_epi32(0x800000)));
  __m512i exponent = _mm512_sub_epi32(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(127));
  _mm512_store_si512(i, _mm512_add_epi32(_mm512_cvtps_epi32(n.v), exponent));
}

inline void add_to_windows(const Terms& terms, int vectors, int32_t top, int64_t* sum) {
  __m512i acc[kWindows];
  for (__m512i& a : acc) a = _mm512_setzero_si512();
  for (int v = 0; v < vectors; ++v) {
    __m512i q = _mm512_load_si512(terms.q + v * kLanes), i = _mm512_load_si512(terms.i + v * kLanes);
    __m512i below = _mm512_sub_epi32(_mm512_set1_epi32(top), _mm512_srai_epi32(i, kWindowShift));
    __m512i shift = _mm512_and_si512(i, _mm512_set1_epi32(15));
    __m512i low = _mm512_sllv_epi64(_mm512_cvtepu32_epi64(_mm512_castsi512_si256(q)),
                                    _mm512_cvtepu32_epi64(_mm512_castsi512_si256(shift)));
    __m512i high = _mm512_sllv_epi64(_mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(q, 1)),
                                     _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(shift, 1)));
    for (int k = 0; k < kWindows; ++k) {
      __mmask16 here = _mm512_cmpeq_epi32_mask(below, _mm512_set1_epi32(k));
      acc[k] = _mm512_mask_add_epi64(acc[k], static_cast<__mmask8>(here), acc[k], low);
      acc[k] = _mm512_mask_add_epi64(acc[k], static_cast<__mmask8>(here >> 8), acc[k], high);
    }
  }
  for (int k = 0; k < kWindows; ++k) sum[k] += _mm512_reduce_add_epi64(acc[k]);
}

#elif defined(SAMEBITS_ISA_avx2)

inline void store_terms_8(__m256 p, __m256 n, int32_t* q, int32_t* i) {
  __m256i bits = _mm256_castps_si256(p);
  __m256i significand = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff));
  _mm256_store_si256(reinterpret_cast<__m256i*>(q), _mm256_or_si256(significand, _mm256_set1_epi32(0x800000)));
  __m256i exponent = _mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127));
  _mm256_store_si256(reinterpret_cast<__m256i*>(i), _mm256_add_epi32(_mm256_cvtps_epi32(n), exponent));
}
inline void store_terms(F32x16 p, F32x16 n, int32_t* q, int32_t* i) {
  store_terms_8(p.lo, n.lo, q, i);
  store_terms_8(p.hi, n.hi, q + 8, i + 8);
}

inline void add_to_windows(const Terms& terms, int vectors, int32_t top, int64_t* sum) {
  __m256i acc[kWindows];
  for (__m256i& a : acc) a = _mm256_setzero_si256();
  for (int j = 0; j < vectors * kLanes; j += 4) {
    __m128i q = _mm_load_si128(reinterpret_cast<const __m128i*>(terms.q + j));
    __m128i i = _mm_load_si128(reinterpret_cast<const __m128i*>(terms.i + j));
    __m128i below = _mm_sub_epi32(_mm_set1_epi32(top), _mm_srai_epi32(i, kWindowShift));
    __m128i shift = _mm_and_si128(i, _mm_set1_epi32(15));
    __m256i value = _mm256_sllv_epi64(_mm256_cvtepu32_epi64(q), _mm256_cvtepu32_epi64(shift));
    __m256i window = _mm256_cvtepi32_epi64(below);
    for (int k = 0; k < kWindows; ++k) {
      __m256i here = _mm256_cmpeq_epi64(window, _mm256_set1_epi64x(k));
      acc[k] = _mm256_add_epi64(acc[k], _mm256_and_si256(here, value));
    }
  }
  for (int k = 0; k < kWindows; ++k) {
    alignas(32) int64_t part[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(part), acc[k]);
    for (int64_t a : part) sum[k] += a;
  }
}

#else

inline void store_terms(F32x16 p, F32x16 n, int32_t* q, int32_t* i) {
  for (int j = 0; j < kLanes; ++j) {
    uint32_t bits = float_to_bits(p.v[j]);
    q[j] = static_cast<int32_t>((bits & 0x7fffffu) | 0x800000u);
    i[j] = static_cast<int32_t>(n.v[j]) + static_cast<int32_t>(bits >> 23) - 127;
  }
}

inline void add_to_windows(const Terms& terms, int vectors, int32_t top, int64_t* sum) {
  for (int j = 0; j < vectors * kLanes; ++j) {
    int32_t below = top - (terms.i[j] >> kWindowShift);
    if (below < kWindows) sum[below] += static_cast<int64_t>(terms.q[j]) << (terms.i[j] & 15);
  }
}

#endif

// One temperature per row, or (null) the same for all. Zero, which asks for the largest logit, divides as 1.
struct Temperatures {
  const float* each;
  float all;
  float of(int64_t row) const {
    float t = each ? each[row] : all;
    return t == 0.0f ? 1.0f : t;
  }
};

// Logits as the contract reads them: + bias where there is one, / temperature where it isn't 1.
struct Scaled {
  const float* logits;
  const float* bias;  // or null
  float temperature;

  F32x16 at(int64_t column, int n) const {
    F32x16 z = load_part(logits + column, n);
    if (bias) z = z + load_part(bias + column, n);
    return temperature == 1.0f ? z : z / F32x16::all(temperature);
  }
  float one(int64_t column) const {
    float z = bias ? logits[column] + bias[column] : logits[column];
    return temperature == 1.0f ? z : z / temperature;
  }
  Scaled from(int64_t column) const { return {logits + column, bias ? bias + column : nullptr, temperature}; }
};

// The terms of n <= kBlock logits; lanes past n, up to a whole vector, are zeros that no window counts.
// Returns the highest exponent.
inline int32_t make_terms(const Scaled& row, int n, Terms& terms) {
  for (int j = 0; j < n; j += kLanes) {
    F32x16 p, e;
    split_exponential(row.at(j, n - j < kLanes ? n - j : kLanes), p, e);
    store_terms(p, e, terms.q + j, terms.i + j);
  }
  for (int j = n; j % kLanes; ++j) { terms.q[j] = 0; terms.i[j] = INT32_MIN; }
  int32_t highest = INT32_MIN;
  for (int j = 0; j < n; ++j) highest = terms.i[j] > highest ? terms.i[j] : highest;
  return highest;
}

inline void absorb_terms(LseState& state, const Terms& terms, int n, int32_t highest) {
  state.raise(highest >> kWindowShift);
  add_to_windows(terms, (n + kLanes - 1) / kLanes, static_cast<int32_t>(state.top), state.sum);
}

inline void absorb(LseState& state, const Scaled& row, int64_t n) {
  Terms terms;
  for (int64_t j = 0; j < n; j += kBlock) {
    int part = static_cast<int>(n - j < kBlock ? n - j : kBlock);
    absorb_terms(state, terms, part, make_terms(row.from(j), part, terms));
  }
}

// The scaled logits at `ids`, n of them, as a row of their own, which lives in `z`.
inline Scaled gather(const Scaled& row, const int64_t* ids, int64_t n, std::vector<float>& z) {
  z.resize(static_cast<size_t>(n));
  for (int64_t k = 0; k < n; ++k) z[static_cast<size_t>(k)] = row.one(ids[k]);
  return {z.data(), nullptr, 1.0f};
}

// ln of the sum: float64 operations only, in the contract's order.
double lse64(const LseState& state);
// log-probability of a scaled logit under a row whose lse64 is given.
float log_probability(double lse, float z);

}  // namespace SAMEBITS_ISA
}  // namespace samebits
