// Sixteen fp32 lanes with the same meaning on every instruction set: AVX-512, AVX2 + FMA, or plain C++.
// Every operation below is one correctly rounded IEEE operation per lane (or a bit operation), so a kernel
// written with it gives the same bits wherever it runs. Reductions across lanes are spelled out by callers.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(SAMEBITS_ISA_avx512) || defined(SAMEBITS_ISA_avx2)
#include <immintrin.h>
#endif

namespace samebits {
namespace SAMEBITS_ISA {

constexpr int kLanes = 16;

inline float bits_to_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline uint32_t float_to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
inline float bf16_to_float(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }

// Round to nearest even; every NaN becomes 0x7fc0, so that payloads can't differ between instruction sets.
inline uint16_t float_to_bf16(float f) {
  uint32_t u = float_to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#if defined(SAMEBITS_ISA_avx512)

struct F32x16 {
  __m512 v;
  static F32x16 zero() { return {_mm512_setzero_ps()}; }
  static F32x16 all(float x) { return {_mm512_set1_ps(x)}; }
  static F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F32x16 load_bf16(const uint16_t* p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_bf16(uint16_t* p) const {
    __m512i u = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
  }
};
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// a > b ? a : b (so the second operand when either is NaN), on every instruction set.
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// Nearest integer, ties to even, as fp32.
inline F32x16 nearest(F32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a - nearest(a), exactly; +0 for an infinity.
inline F32x16 fraction(F32x16 a) { return {_mm512_reduce_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for a positive `a` and an integral n of any size, infinities too: one rounding.
inline F32x16 scaled(F32x16 a, F32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// Lanes of `a` where `key` is NaN are replaced by the canonical NaN.
inline F32x16 keep_nan(F32x16 a, F32x16 key) {
  return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(key.v, key.v, _CMP_UNORD_Q),
                             _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)))};
}

#elif defined(SAMEBITS_ISA_avx2)

struct F32x16 {
  __m256 lo, hi;
  static F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F32x16 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static F32x16 load_bf16(const uint16_t* p) { return {widen(p), widen(p + 8)}; }
  void store(float* p) const { _mm256_storeu_ps(p, lo); _mm256_storeu_ps(p + 8, hi); }
  void store_bf16(uint16_t* p) const { narrow(lo, p); narrow(hi, p + 8); }

 private:
  static __m256 widen(const uint16_t* p) {
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
  }
  static void narrow(__m256 v, uint16_t* p) {
    __m256i u = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }
};
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32x16 nearest(F32x16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
// 2^n for an integral fp32 n in [-126, 127].
inline __m256 power_of_two_8(__m256 n) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
inline F32x16 power_of_two(F32x16 n) { return {power_of_two_8(n.lo), power_of_two_8(n.hi)}; }
inline F32x16 keep_nan(F32x16 a, F32x16 key) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return {_mm256_blendv_ps(a.lo, nan, _mm256_cmp_ps(key.lo, key.lo, _CMP_UNORD_Q)),
          _mm256_blendv_ps(a.hi, nan, _mm256_cmp_ps(key.hi, key.hi, _CMP_UNORD_Q))};
}

#else

struct F32x16 {
  float v[kLanes];
  static F32x16 zero() { return all(0.0f); }
  static F32x16 all(float x) { F32x16 r; for (float& e : r.v) e = x; return r; }
  static F32x16 load(const float* p) { F32x16 r; std::memcpy(r.v, p, sizeof r.v); return r; }
  static F32x16 load_bf16(const uint16_t* p) {
    F32x16 r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = bf16_to_float(p[i]);
    return r;
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
  void store_bf16(uint16_t* p) const { for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(v[i]); }
};
template <class Op> inline F32x16 lanewise(Op op) {
  F32x16 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = op(i);
  return r;
}
inline F32x16 operator+(F32x16 a, F32x16 b) { return lanewise([&](int i) { return a.v[i] + b.v[i]; }); }
inline F32x16 operator-(F32x16 a, F32x16 b) { return lanewise([&](int i) { return a.v[i] - b.v[i]; }); }
inline F32x16 operator*(F32x16 a, F32x16 b) { return lanewise([&](int i) { return a.v[i] * b.v[i]; }); }
inline F32x16 operator/(F32x16 a, F32x16 b) { return lanewise([&](int i) { return a.v[i] / b.v[i]; }); }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return lanewise([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline F32x16 max(F32x16 a, F32x16 b) { return lanewise([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F32x16 min(F32x16 a, F32x16 b) { return lanewise([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F32x16 nearest(F32x16 a) { return lanewise([&](int i) { return __builtin_rintf(a.v[i]); }); }
inline F32x16 power_of_two(F32x16 n) {
  return lanewise([&](int i) {
    return bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23);
  });
}
inline F32x16 keep_nan(F32x16 a, F32x16 key) {
  return lanewise([&](int i) { return key.v[i] != key.v[i] ? bits_to_float(0x7fc00000u) : a.v[i]; });
}

#endif

inline F32x16& operator+=(F32x16& a, F32x16 b) { return a = a + b; }

// The first n <= 16 lanes from memory, the others +0.
inline F32x16 load_part(const float* p, int n) {
  if (n == kLanes) return F32x16::load(p);
  float t[kLanes] = {};
  std::memcpy(t, p, static_cast<size_t>(n) * sizeof(float));
  return F32x16::load(t);
}
inline F32x16 load_part_bf16(const uint16_t* p, int n) {
  if (n == kLanes) return F32x16::load_bf16(p);
  uint16_t t[kLanes] = {};
  std::memcpy(t, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return F32x16::load_bf16(t);
}
inline void store_part(F32x16 a, float* p, int n) {
  if (n == kLanes) return a.store(p);
  float t[kLanes];
  a.store(t);
  std::memcpy(p, t, static_cast<size_t>(n) * sizeof(float));
}
inline void store_part_bf16(F32x16 a, uint16_t* p, int n) {
  if (n == kLanes) return a.store_bf16(p);
  uint16_t t[kLanes];
  a.store_bf16(t);
  std::memcpy(p, t, static_cast<size_t>(n) * sizeof(uint16_t));
}

// The contract's fold: halves added onto each other, 16 -> 8 -> 4 -> 2 -> 1.
#if defined(SAMEBITS_ISA_avx512) || defined(SAMEBITS_ISA_avx2)
inline float fold(F32x16 a) {
#if defined(SAMEBITS_ISA_avx512)
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
  __m256 eight = _mm256_add_ps(a.lo, a.hi);
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float fold(F32x16 a) {
  float t[kLanes];
  a.store(t);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) t[i] = t[i] + t[i + half];
  return t[0];
}
#endif

}  // namespace SAMEBITS_ISA
}  // namespace samebits
