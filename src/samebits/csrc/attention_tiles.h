// The pieces that attention's forward and backward kernels share: blocks of fma chains and tiles in fp32.
#pragma once

#include <cstdint>

#include "primitives.h"

namespace samebits {
namespace SAMEBITS_ISA {

constexpr int kTile = 64;
constexpr int kChunk = 512;

// Rows and 16-lane vectors of one register block: 24 accumulators of 32 registers, or 12 of 16.
constexpr int kBlockRows = 6;
#if defined(SAMEBITS_ISA_avx512)
constexpr int kBlockVectors = 4;
#else
constexpr int kBlockVectors = 1;
#endif

constexpr int padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

// A matrix whose element (row, k) is at data[row * row_stride + k * k_stride].
struct Left {
  const float* data;
  int64_t row_stride, k_stride;
  Left from(int64_t row, int64_t k) const { return {data + row * row_stride + k * k_stride, row_stride, k_stride}; }
};

// The right-hand matrix, 16 columns at a time: fp32 rows, or rows of bf16 anywhere in memory.
struct Wide {
  const float* data;
  int64_t stride;
  F32x16 at(int k, int column) const { return F32x16::load(data + k * stride + column); }
  Wide from(int k, int column) const { return {data + k * stride + column, stride}; }
};
struct Narrow {
  const uint16_t* const* rows;
  int column;
  F32x16 at(int k, int c) const { return F32x16::load_bf16(rows[k] + column + c); }
  Narrow from(int k, int c) const { return {rows + k, column + c}; }
};

template <int R, int V, class Right>
inline void chain_registers(Left a, Right b, float* c, int64_t c_stride, int count, bool fresh) {
  F32x16 acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = fresh ? F32x16::zero() : F32x16::load(c + r * c_stride + v * kLanes);
  for (int k = 0; k < count; ++k) {
    F32x16 x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) x[v] = b.at(k, v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      F32x16 w = F32x16::all(a.data[r * a.row_stride + k * a.k_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = fma(w, x[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v].store(c + r * c_stride + v * kLanes);
}

template <int R, class Right>
inline void chain_columns(Left a, Right b, float* c, int64_t c_stride, int count, int vectors, bool fresh) {
  int blocks = (vectors + kBlockVectors - 1) / kBlockVectors;
  for (int i = 0; i < blocks; ++i) {
    int begin = vectors * i / blocks, n = vectors * (i + 1) / blocks - begin;
    Right bi = b.from(0, begin * kLanes);
    float* ci = c + begin * kLanes;
    switch (n) {
      case 1: chain_registers<R, 1>(a, bi, ci, c_stride, count, fresh); break;
#if defined(SAMEBITS_ISA_avx512)
      case 2: chain_registers<R, 2>(a, bi, ci, c_stride, count, fresh); break;
      case 3: chain_registers<R, 3>(a, bi, ci, c_stride, count, fresh); break;
      case 4: chain_registers<R, 4>(a, bi, ci, c_stride, count, fresh); break;
#endif
    }
  }
}

// C[r][n] = fma(A[r][k], B[k][n], C[r][n]) for k ascending, over 16 * vectors columns and at most kBlockRows rows;
// fresh: C starts from +0.
template <class Right>
inline void chain(Left a, Right b, float* c, int64_t c_stride, int rows, int count, int vectors, bool fresh) {
  switch (rows) {
    case 1: return chain_columns<1>(a, b, c, c_stride, count, vectors, fresh);
    case 2: return chain_columns<2>(a, b, c, c_stride, count, vectors, fresh);
    case 3: return chain_columns<3>(a, b, c, c_stride, count, vectors, fresh);
    case 4: return chain_columns<4>(a, b, c, c_stride, count, vectors, fresh);
    case 5: return chain_columns<5>(a, b, c, c_stride, count, vectors, fresh);
    case 6: return chain_columns<6>(a, b, c, c_stride, count, vectors, fresh);
  }
}

// The same where row r stops before k = ends[r]; ends ascend.
template <class Right>
inline void chain_to_ends(Left a, Right b, float* c, int64_t c_stride, int rows, const int* ends, int vectors,
                          bool fresh) {
  int common = ends[0];
  chain(a, b, c, c_stride, rows, common, vectors, fresh);
  for (int r = 1; r < rows; ++r)
    if (ends[r] > common)
      chain(a.from(r, common), b.from(common, 0), c + r * c_stride, c_stride, 1, ends[r] - common, vectors, false);
}

// n bf16 values as fp32, with zeros up to the next multiple of 16.
inline void widen_row(const uint16_t* from, int n, float* to) {
  for (int i = 0; i < n; i += kLanes) load_part_bf16(from + i, n - i < kLanes ? n - i : kLanes).store(to + i);
}

// n fp32 values, rounded to bf16.
inline void narrow_row(const float* from, int n, uint16_t* to) {
  for (int i = 0; i < n; i += kLanes) store_part_bf16(F32x16::load(from + i), to + i, n - i < kLanes ? n - i : kLanes);
}

// to[d][i] = row i at from + d in fp32, for n <= 64 rows; columns up to the next multiple of 16 are zero.
void transpose_rows(const uint16_t* const* rows, int n, int from, int dim, float* to);

// The largest lane; no lane is NaN.
inline float largest_lane(F32x16 a) {
#if defined(SAMEBITS_ISA_avx512)
  return _mm512_reduce_max_ps(a.v);
#else
  float t[kLanes];
  a.store(t);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) t[i] = t[i + half] > t[i] ? t[i + half] : t[i];
  return t[0];
#endif
}

// The nearest bf16 value, as fp32.
inline F32x16 through_bf16(F32x16 a) {
#if defined(SAMEBITS_ISA_avx512)
  __m512i u = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return keep_nan({_mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(0xffff0000)))}, a);
#else
  uint16_t t[kLanes];
  a.store_bf16(t);
  return F32x16::load_bf16(t);
#endif
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
