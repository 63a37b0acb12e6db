// y = x W^T for a few rows of x (a decode step): every weight is used a few times only, so it goes from memory
// through registers into the products, without a packed copy. AVX-512 only; elsewhere panels are packed.
#pragma once

#include "vec.h"

namespace samebits {
namespace SAMEBITS_ISA {

#if defined(SAMEBITS_ISA_avx512)

constexpr int kFewRows = 16;
constexpr int kPairedRows = 2;  // up to here two vectors of columns at a time, for more independent chains
constexpr int64_t kStep = 8;       // k per step: 16 bytes of each row of W
constexpr int64_t kAhead = 512;     // how far ahead of its use a row of W is asked for, in elements

// 16 bytes of rows r, r+4, r+8, r+12 side by side
inline __m512i gather_quarters(const uint16_t* w, int64_t stride) {
  auto part = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + i * stride)); };
  __m512i v = _mm512_castsi128_si512(part(0));
  v = _mm512_inserti32x4(v, part(4), 1);
  v = _mm512_inserti32x4(v, part(8), 2);
  return _mm512_inserti32x4(v, part(12), 3);
}

// 8 consecutive k of 16 rows of W as four vectors of pairs (2p, 2p + 1): lane = row
struct Pairs {
  __m512i p[4];
  Pairs(const uint16_t* w, int64_t stride) {
    __m512i a = gather_quarters(w, stride), b = gather_quarters(w + stride, stride);
    __m512i c = gather_quarters(w + 2 * stride, stride), d = gather_quarters(w + 3 * stride, stride);
    __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    __m512i AB = _mm512_unpackhi_epi32(a, b), CD = _mm512_unpackhi_epi32(c, d);
    p[0] = _mm512_unpacklo_epi64(ab, cd);
    p[1] = _mm512_unpackhi_epi64(ab, cd);
    p[2] = _mm512_unpacklo_epi64(AB, CD);
    p[3] = _mm512_unpackhi_epi64(AB, CD);
  }
  __m512 at(int k) const {
    __m512i high = k % 2 ? _mm512_and_si512(p[k / 2], _mm512_set1_epi32(static_cast<int>(0xffff0000)))
                         : _mm512_slli_epi32(p[k / 2], 16);
    return _mm512_castsi512_ps(high);
  }
};

// R rows of x (fp32, LeftStride apart) with 16 V rows of W: c[R][16 V] continues over `depth` k.
template <int R, int V, int64_t LeftStride>
void few_rows(const float* x, const uint16_t* w, int64_t w_stride, int64_t depth, float* c, int64_t c_stride,
              bool from_c) {
  __m512 acc[V][R];
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      acc[v][r] = from_c ? _mm512_loadu_ps(c + r * c_stride + v * kLanes) : _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const uint16_t* rows = w + v * kLanes * w_stride + k;
      // a step uses a quarter of a cache line of each row, so it asks for the next lines of a quarter of the rows
      const uint16_t* next = rows + (k / kStep % 4 * 4) * w_stride + kAhead;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) _mm_prefetch(reinterpret_cast<const char*>(next + i * w_stride), _MM_HINT_T0);
      Pairs pairs(rows, w_stride);
#pragma GCC unroll 8
      for (int j = 0; j < kStep; ++j) {
        __m512 b = pairs.at(j);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
          acc[v][r] = _mm512_fmadd_ps(_mm512_set1_ps(x[r * LeftStride + k + j]), b, acc[v][r]);
      }
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(c + r * c_stride + v * kLanes, acc[v][r]);
  // what is left of k, one column of W at a time
  for (; k < depth; ++k)
    for (int v = 0; v < V; ++v) {
      float column[kLanes];
      for (int i = 0; i < kLanes; ++i) column[i] = bf16_to_float(w[(v * kLanes + i) * w_stride + k]);
      for (int r = 0; r < R; ++r) {
        float* at = c + r * c_stride + v * kLanes;
        fma(F32x16::all(x[r * LeftStride + k]), F32x16::load(column), F32x16::load(at)).store(at);
      }
    }
}

using FewRows = void (*)(const float*, const uint16_t*, int64_t, int64_t, float*, int64_t, bool);

template <int64_t LeftStride, int R = kFewRows>
FewRows pick_few_rows(int rows, int vectors) {
  if constexpr (R > 1)
    if (rows < R) return pick_few_rows<LeftStride, R - 1>(rows, vectors);
  if constexpr (R <= kPairedRows)
    if (vectors == 2) return few_rows<R, 2, LeftStride>;
  return few_rows<R, 1, LeftStride>;
}

#else

constexpr int kFewRows = 0;

#endif

}  // namespace SAMEBITS_ISA
}  // namespace samebits
