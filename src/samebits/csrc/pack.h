// Moving bf16 matrices into the fp32 layouts of the matrix products. Every value is converted exactly.
#pragma once

#include "vec.h"

namespace samebits {
namespace SAMEBITS_ISA {

// n consecutive values
inline void widen(const uint16_t* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) F32x16::load_bf16(from + i).store(to + i);
  for (; i < n; ++i) to[i] = bf16_to_float(from[i]);
}

// A block of 16 rows x 32 columns, turned: column j becomes the 16 floats at to + j * to_stride.
// Columns are moved as pairs of 32 bits, which halves the shuffles; then the halves of a pair are widened.
#if defined(SAMEBITS_ISA_avx512)
inline void transpose_block(const uint16_t* from, int64_t stride, float* to, int64_t to_stride) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
    for (int h = 0; h < 2; ++h) {
      r[i + 2 * h] = _mm512_unpacklo_epi64(t[i + h], t[i + 2 + h]);
      r[i + 2 * h + 1] = _mm512_unpackhi_epi64(t[i + h], t[i + 2 + h]);
    }
  // r[4g + c] holds, in quarter q, pair column 4q + c of rows 4g .. 4g+3
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    __m512i lo01 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44), hi01 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
    __m512i lo23 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44);
    __m512i hi23 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
    __m512i column[4] = {_mm512_shuffle_i32x4(lo01, lo23, 0x88), _mm512_shuffle_i32x4(lo01, lo23, 0xdd),
                         _mm512_shuffle_i32x4(hi01, hi23, 0x88), _mm512_shuffle_i32x4(hi01, hi23, 0xdd)};
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      float* pair = to + 2 * (4 * q + c) * to_stride;
      _mm512_storeu_si512(pair, _mm512_slli_epi32(column[q], 16));
      _mm512_storeu_si512(pair + to_stride, _mm512_and_si512(column[q], _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
  }
}
#elif defined(SAMEBITS_ISA_avx2)
inline void transpose_8x16(const uint16_t* from, int64_t stride, float* to, int64_t to_stride) {
  __m256i r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * stride));
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int h = 0; h < 2; ++h) {
      r[i + 2 * h] = _mm256_unpacklo_epi64(t[i + h], t[i + 2 + h]);
      r[i + 2 * h + 1] = _mm256_unpackhi_epi64(t[i + h], t[i + 2 + h]);
    }
  for (int c = 0; c < 4; ++c)
    for (int half = 0; half < 2; ++half) {
      __m256i column = half ? _mm256_permute2x128_si256(r[c], r[4 + c], 0x31)
                            : _mm256_permute2x128_si256(r[c], r[4 + c], 0x20);
      float* pair = to + 2 * (4 * half + c) * to_stride;
      __m256i odd = _mm256_and_si256(column, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
      _mm256_storeu_ps(pair, _mm256_castsi256_ps(_mm256_slli_epi32(column, 16)));
      _mm256_storeu_ps(pair + to_stride, _mm256_castsi256_ps(odd));
    }
}
inline void transpose_block(const uint16_t* from, int64_t stride, float* to, int64_t to_stride) {
  for (int row = 0; row < 16; row += 8)
    for (int column = 0; column < 32; column += 16)
      transpose_8x16(from + row * stride + column, stride, to + column * to_stride + row, to_stride);
}
#else
inline void transpose_block(const uint16_t* from, int64_t stride, float* to, int64_t to_stride) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 32; ++j) to[j * to_stride + i] = bf16_to_float(from[i * stride + j]);
}
#endif

// rows <= 16 rows x n columns, turned as above; missing rows become +0.
inline void transpose(const uint16_t* from, int64_t stride, int rows, int64_t n, float* to, int64_t to_stride) {
  int64_t j = 0;
  if (rows == kLanes)
    for (; j + 32 <= n; j += 32) transpose_block(from + j, stride, to + j * to_stride, to_stride);
  for (; j < n; j += 32) {
    int64_t part = n - j < 32 ? n - j : 32;
    uint16_t rest[16 * 32] = {};
    for (int i = 0; i < rows; ++i) std::memcpy(rest + i * 32, from + i * stride + j, static_cast<size_t>(part) * 2);
    float turned[32 * 16];
    transpose_block(rest, 32, turned, 16);
    for (int64_t p = 0; p < part; ++p) std::memcpy(to + (j + p) * to_stride, turned + p * 16, 64);
  }
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
