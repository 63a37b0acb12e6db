#include "attention_tiles.h"

namespace samebits {
namespace SAMEBITS_ISA {
namespace {

const uint16_t kZeros[1024] = {};

#if defined(SAMEBITS_ISA_avx512)

constexpr int kPairs = 16;  // rows of one block, and pairs of bf16 values of one load

// 16 rows of 16 dwords become 16 columns.
inline void transpose(__m512i r[kPairs]) {
  __m512i t[kPairs];
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; i += 4) {
    __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, c);
    t[i + 1] = _mm512_unpackhi_epi64(a, c);
    t[i + 2] = _mm512_unpacklo_epi64(b, d);
    t[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  // t[4 g + j] holds in its quarter q the column 4 q + j of the rows 4 g .. 4 g + 3
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    __m512i a = _mm512_shuffle_i32x4(t[j], t[4 + j], 0x88), b = _mm512_shuffle_i32x4(t[j], t[4 + j], 0xdd);
    __m512i c = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0x88), d = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0xdd);
    r[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    r[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    r[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

inline void transpose_block(const uint16_t* const* rows, int dim, float* to) {
  for (int d = 0; d < dim; d += 2 * kPairs) {
    int left = dim - d < 2 * kPairs ? dim - d : 2 * kPairs;
    __mmask32 mask = left == 32 ? 0xffffffffu : (1u << left) - 1;
    __m512i r[kPairs];
#pragma GCC unroll 16
    for (int i = 0; i < kPairs; ++i) r[i] = _mm512_maskz_loadu_epi16(mask, rows[i] + d);
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < kPairs; ++i) {
      if (2 * i < left) _mm512_storeu_si512(to + (d + 2 * i) * kTile, _mm512_slli_epi32(r[i], 16));
      if (2 * i + 1 < left)
        _mm512_storeu_si512(to + (d + 2 * i + 1) * kTile, _mm512_and_si512(r[i], _mm512_set1_epi32(0xffff0000)));
    }
  }
}

#else

inline void transpose_block(const uint16_t* const* rows, int dim, float* to) {
  for (int i = 0; i < kLanes; ++i)
    for (int d = 0; d < dim; ++d) to[d * kTile + i] = bf16_to_float(rows[i][d]);
}

#endif

}  // namespace

void transpose_rows(const uint16_t* const* rows, int n, int from, int dim, float* to) {
  for (int i = 0; i < n; i += kLanes) {
    const uint16_t* block[kLanes];
    for (int j = 0; j < kLanes; ++j) block[j] = i + j < n ? rows[i + j] + from : kZeros;
    transpose_block(block, dim, to + i);
  }
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
