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

template <int R, int V>
inline void chain_registers(Left a, const float* b, int64_t b_stride, float* c, int64_t c_stride, int count,
                            bool fresh) {
  F32x16 acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = fresh ? F32x16::zero() : F32x16::load(c + r * c_stride + v * kLanes);
  for (int k = 0; k < count; ++k) {
    F32x16 x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) x[v] = F32x16::load(b + k * b_stride + v * kLanes);
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

template <int R>
inline void chain_columns(Left a, const float* b, int64_t b_stride, float* c, int64_t c_stride, int count, int vectors,
                          bool fresh) {
  int blocks = (vectors + kBlockVectors - 1) / kBlockVectors;
  for (int i = 0; i < blocks; ++i) {
    int begin = vectors * i / blocks, n = vectors * (i + 1) / blocks - begin;
    const float* bi = b + begin * kLanes;
    float* ci = c + begin * kLanes;
    switch (n) {
      case 1: chain_registers<R, 1>(a, bi, b_stride, ci, c_stride, count, fresh); break;
#if defined(SAMEBITS_ISA_avx512)
      case 2: chain_registers<R, 2>(a, bi, b_stride, ci, c_stride, count, fresh); break;
      case 3: chain_registers<R, 3>(a, bi, b_stride, ci, c_stride, count, fresh); break;
      case 4: chain_registers<R, 4>(a, bi, b_stride, ci, c_stride, count, fresh); break;
#endif
    }
  }
}

// C[r][n] = fma(A[r][k], B[k][n], C[r][n]) for k ascending, over 16 * vectors columns and at most kBlockRows rows;
// fresh: C starts from +0.
inline void chain(Left a, const float* b, int64_t b_stride, float* c, int64_t c_stride, int rows, int count,
                  int vectors, bool fresh) {
  switch (rows) {
    case 1: return chain_columns<1>(a, b, b_stride, c, c_stride, count, vectors, fresh);
    case 2: return chain_columns<2>(a, b, b_stride, c, c_stride, count, vectors, fresh);
    case 3: return chain_columns<3>(a, b, b_stride, c, c_stride, count, vectors, fresh);
    case 4: return chain_columns<4>(a, b, b_stride, c, c_stride, count, vectors, fresh);
    case 5: return chain_columns<5>(a, b, b_stride, c, c_stride, count, vectors, fresh);
    case 6: return chain_columns<6>(a, b, b_stride, c, c_stride, count, vectors, fresh);
  }
}

// The same where row r stops before k = ends[r]; ends ascend.
inline void chain_to_ends(Left a, const float* b, int64_t b_stride, float* c, int64_t c_stride, int rows,
                          const int* ends, int vectors, bool fresh) {
  int common = ends[0];
  chain(a, b, b_stride, c, c_stride, rows, common, vectors, fresh);
  for (int r = 1; r < rows; ++r)
    if (ends[r] > common)
      chain(a.from(r, common), b + common * b_stride, b_stride, c + r * c_stride, c_stride, 1, ends[r] - common,
            vectors, false);
}

// n bf16 values as fp32, with zeros up to the next multiple of 16.
inline void widen_row(const uint16_t* from, int n, float* to) {
  for (int i = 0; i < n; i += kLanes) load_part_bf16(from + i, n - i < kLanes ? n - i : kLanes).store(to + i);
}

// n fp32 values, rounded to bf16.
inline void narrow_row(const float* from, int n, uint16_t* to) {
  for (int i = 0; i < n; i += kLanes) store_part_bf16(F32x16::load(from + i), to + i, n - i < kLanes ? n - i : kLanes);
}

// to[d][i] = row i at d in fp32, for n <= 64 rows; columns up to the next multiple of 16 are zero.
void transpose_rows(const uint16_t* const* rows, int n, int dim, float* to);

// The largest lane, NaN lanes aside.
inline float largest_lane(F32x16 a) {
  float t[kLanes];
  a.store(t);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) t[i] = t[i + half] > t[i] ? t[i + half] : t[i];
  return t[0];
}

// The nearest bf16 value, as fp32.
inline F32x16 through_bf16(F32x16 a) {
  uint16_t t[kLanes];
  a.store_bf16(t);
  return F32x16::load_bf16(t);
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
