#include "gemm.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>

#include "few_rows.h"
#include "pack.h"
#include "pool.h"

namespace samebits {
namespace SAMEBITS_ISA {
namespace {

#if defined(SAMEBITS_ISA_avx512)
constexpr int kRows = 14;  // 14 x 2 vectors: 28 accumulators of 32 registers
constexpr int vectors_for(int rows) { return rows <= 6 ? 4 : 2; }
#elif defined(SAMEBITS_ISA_avx2)
constexpr int kRows = 6;  // a vector is two registers here: 12 accumulators of 16
constexpr int vectors_for(int rows) { return rows <= 2 ? 2 : 1; }
#else
constexpr int kRows = 4;
constexpr int vectors_for(int) { return 1; }
#endif

constexpr int64_t kDepth = 256;                // k per block
constexpr int64_t kLeftStride = kDepth + 16;   // off the power of two, so that rows don't share cache sets
constexpr int64_t kPanel = kDepth * kLanes;    // one panel: kDepth x 16 columns

constexpr int64_t kRowUnit = 16, kColumnUnit = 32;  // how threads cut the output
constexpr int64_t kWorthWaking = 16384;             // vector operations per part

// R rows x V vectors of c. left: rows kLeftStride apart; right: V panels [depth][16].
template <int R, int V>
void micro(const float* left, const float* right, int64_t depth, float* c, int64_t c_stride, bool from_c) {
  F32x16 acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      acc[r][v] = from_c ? F32x16::load(c + r * c_stride + v * kLanes) : F32x16::zero();
  for (int64_t k = 0; k < depth; ++k) {
    F32x16 b[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) b[v] = F32x16::load(right + v * kPanel + k * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F32x16 a = F32x16::all(left[r * kLeftStride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = fma(a, b[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v].store(c + r * c_stride + v * kLanes);
}

using Micro = void (*)(const float*, const float*, int64_t, float*, int64_t, bool);

template <int R> Micro pick_vectors(int vectors) {
  if constexpr (vectors_for(R) >= 4) if (vectors == 4) return micro<R, 4>;
  if constexpr (vectors_for(R) >= 2) if (vectors == 2) return micro<R, 2>;
  return micro<R, 1>;
}

template <int R = kRows> Micro pick_micro(int rows, int vectors) {
  if constexpr (R > 1) if (rows < R) return pick_micro<R - 1>(rows, vectors);
  return pick_vectors<R>(vectors);
}

// One block of K for all rows and columns of a tile whose operands are packed.
void block(const float* left, int64_t rows, const float* right, int64_t columns, int64_t depth, float* c,
           int64_t c_stride, bool from_c) {
  int64_t tiles = (rows + kRows - 1) / kRows;
  int tall = static_cast<int>((rows + tiles - 1) / tiles);  // even heights: a tile of one row would crawl
  int widest = vectors_for(tall);
  int64_t whole = columns / kLanes;
  for (int64_t p = 0; p < whole;) {
    int v = widest;
    while (v > whole - p) v /= 2;
    for (int64_t r = 0; r < rows; r += tall)
      pick_micro(static_cast<int>(std::min<int64_t>(tall, rows - r)), v)(
          left + r * kLeftStride, right + p * kPanel, depth, c + r * c_stride + p * kLanes, c_stride, from_c);
    p += v;
  }
  // the last columns, fewer than a vector, by way of a tile of whole vectors
  size_t bytes = static_cast<size_t>(columns % kLanes) * sizeof(float);
  if (bytes == 0) return;
  for (int64_t r = 0; r < rows; r += tall) {
    int height = static_cast<int>(std::min<int64_t>(tall, rows - r));
    float tile[kRows * kLanes] = {};
    float* from = c + r * c_stride + whole * kLanes;
    if (from_c) for (int i = 0; i < height; ++i) std::memcpy(tile + i * kLanes, from + i * c_stride, bytes);
    pick_micro(height, 1)(left + r * kLeftStride, right + whole * kPanel, depth, tile, kLanes, from_c);
    for (int i = 0; i < height; ++i) std::memcpy(from + i * c_stride, tile + i * kLanes, bytes);
  }
}

struct Operand {
  const uint16_t* data;
  int64_t stride;
  bool k_inner;  // k runs along memory
  const uint16_t* at(int64_t index, int64_t k) const {
    return k_inner ? data + index * stride + k : data + k * stride + index;
  }
};

// rows of the left operand as fp32, k running along memory, kLeftStride apart
void pack_left(const Operand& a, int64_t row, int64_t rows, int64_t k, int64_t depth, float* out) {
  if (a.k_inner) {
    for (int64_t r = 0; r < rows; ++r) widen(a.at(row + r, k), depth, out + r * kLeftStride);
  } else {
    for (int64_t d = 0; d < depth; d += kLanes)
      transpose(a.at(row, k + d), a.stride, static_cast<int>(std::min<int64_t>(kLanes, depth - d)), rows, out + d,
                kLeftStride);
  }
}

// columns of the right operand as panels [depth][16] of fp32
void pack_right(const Operand& b, int64_t column, int64_t columns, int64_t k, int64_t depth, float* out) {
  for (int64_t n = 0; n < columns; n += kLanes, out += kPanel) {
    int part = static_cast<int>(std::min<int64_t>(kLanes, columns - n));
    if (b.k_inner) transpose(b.at(column + n, k), b.stride, part, depth, out, kLanes);
    else for (int64_t d = 0; d < depth; ++d) load_part_bf16(b.at(column + n, k + d), part).store(out + d * kLanes);
  }
}

#if defined(SAMEBITS_ISA_avx512)
// m <= kFewRows, k along memory on both sides; returns how many columns it did: the whole vectors.
int64_t few_rows_product(const Operand& a, int64_t m, const Operand& b, int64_t n, int64_t k, float* c,
                         int64_t c_stride, bool accumulate) {
  int64_t blocks = (k + kDepth - 1) / kDepth, size = m * kLeftStride;
  float* left = scratch(0, size * blocks);
  for (int64_t i = 0; i < blocks; ++i)
    pack_left(a, 0, m, i * kDepth, std::min(kDepth, k - i * kDepth), left + i * size);
  int64_t done = 0;
  for (int v; n - done >= kLanes; done += v * kLanes) {
    v = n - done >= 2 * kLanes && m <= kPairedRows ? 2 : 1;
    FewRows run = pick_few_rows<kLeftStride>(static_cast<int>(m), v);
    for (int64_t i = 0; i < blocks; ++i)
      run(left + i * size, b.at(done, i * kDepth), b.stride, std::min(kDepth, k - i * kDepth), c + done, c_stride,
          accumulate || i > 0);
  }
  return done;
}
#endif

void product(const Operand& a, int64_t m, const Operand& b, int64_t n, int64_t k, float* c, int64_t c_stride,
             bool accumulate) {
  int64_t blocks = (k + kDepth - 1) / kDepth;
  if (blocks == 0 && !accumulate)
    for (int64_t r = 0; r < m; ++r) std::fill_n(c + r * c_stride, n, 0.0f);
  int64_t first = 0;
#if defined(SAMEBITS_ISA_avx512)
  if (m <= kFewRows && a.k_inner && b.k_inner) first = few_rows_product(a, m, b, n, k, c, c_stride, accumulate);
  if (first == n) return;
#endif
  // few rows: panels stay in the first-level cache; many rows: they are reused from the second level
  int64_t wide = m <= 2 * kRows ? 4 * kLanes : kTileColumns;
  int64_t left_size = std::min(m, kTileRows) * kLeftStride;
  bool keep_left = left_size * blocks <= (1 << 18);
  float* left = scratch(0, left_size * (keep_left ? blocks : 1));
  float* right = scratch(1, std::min(wide, n + kLanes) / kLanes * kPanel);
  for (int64_t r = 0; r < m; r += kTileRows) {
    int64_t rows = std::min(kTileRows, m - r);
    for (int64_t j = first; j < n; j += wide) {
      int64_t columns = std::min(wide, n - j);
      for (int64_t i = 0; i < blocks; ++i) {
        int64_t at = i * kDepth, depth = std::min(kDepth, k - at);
        float* own = left + (keep_left ? i * left_size : 0);
        if (!keep_left || j == first) pack_left(a, r, rows, at, depth, own);
        pack_right(b, j, columns, at, depth, right);
        block(own, rows, right, columns, depth, c + r * c_stride + j, c_stride, accumulate || i > 0);
      }
    }
  }
}

template <class Store>
void finish(const float* sum, const uint16_t* bias, int64_t n, Store store) {
  for (int64_t i = 0; i < n; i += kLanes) {
    int part = static_cast<int>(std::min<int64_t>(kLanes, n - i));
    F32x16 value = load_part(sum + i, part);
    if (bias) value = value + load_part_bf16(bias + i, part);
    store(keep_nan(value, value), i, part);
  }
}

}  // namespace

void gemm_nt(const uint16_t* a, int64_t a_stride, int64_t m, const uint16_t* b, int64_t b_stride, int64_t n,
             int64_t k, float* c, int64_t c_stride, bool accumulate) {
  product({a, a_stride, true}, m, {b, b_stride, true}, n, k, c, c_stride, accumulate);
}
void gemm_nn(const uint16_t* a, int64_t a_stride, int64_t m, const uint16_t* b, int64_t b_stride, int64_t n,
             int64_t k, float* c, int64_t c_stride, bool accumulate) {
  product({a, a_stride, true}, m, {b, b_stride, false}, n, k, c, c_stride, accumulate);
}
void gemm_tn(const uint16_t* a, int64_t a_stride, int64_t m, const uint16_t* b, int64_t b_stride, int64_t n,
             int64_t k, float* c, int64_t c_stride, bool accumulate) {
  product({a, a_stride, false}, m, {b, b_stride, false}, n, k, c, c_stride, accumulate);
}

void gemm_split(int64_t m, int64_t n, int64_t k, const Part& body) {
  // in vector operations: m / 16 per weight for the products, and a fixed share for the packing
  int64_t work = n * k * (m + 8) / kLanes;
  int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads(), work / kWorthWaking));
  int64_t row_units = (m + kRowUnit - 1) / kRowUnit, column_units = (n + kColumnUnit - 1) / kColumnUnit;
  int64_t down = 1, across = 1, best = std::numeric_limits<int64_t>::max();
  for (int64_t d = 1; d <= std::min(parts, row_units); ++d) {
    int64_t a = std::min(parts / d, column_units);
    int64_t tall = (row_units + d - 1) / d, wide = (column_units + a - 1) / a;
    int64_t cost = tall * wide + wide / 2 + tall / 8;  // products, packing of columns, packing of rows
    if (cost < best) best = cost, down = d, across = a;
  }
  auto cut = [](int64_t i, int64_t pieces, int64_t units, int64_t unit, int64_t end) {
    return std::min(units * i / pieces * unit, end);
  };
  parallel_for(down * across, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t d = i / across, a = i % across;
      int64_t row = cut(d, down, row_units, kRowUnit, m), column = cut(a, across, column_units, kColumnUnit, n);
      body(row, cut(d + 1, down, row_units, kRowUnit, m) - row, column,
           cut(a + 1, across, column_units, kColumnUnit, n) - column);
    }
  });
}

void gemm_tiles(int64_t row, int64_t rows, int64_t column, int64_t columns, const Part& body) {
  int64_t tall = std::min(rows, kTileRows);
  if (tall == 0) return;
  int64_t wide = std::max(kTileColumns, kTileSize / tall / kTileColumns * kTileColumns);
  for (int64_t r = 0; r < rows; r += tall)
    for (int64_t c = 0; c < columns; c += wide)
      body(row + r, std::min(tall, rows - r), column + c, std::min(wide, columns - c));
}

void finish_row(const float* sum, const uint16_t* bias, uint16_t* y, int64_t n) {
  finish(sum, bias, n, [&](F32x16 v, int64_t i, int part) { store_part_bf16(v, y + i, part); });
}
void finish_row(const float* sum, const uint16_t* bias, float* y, int64_t n) {
  finish(sum, bias, n, [&](F32x16 v, int64_t i, int part) { store_part(v, y + i, part); });
}

float* scratch(int slot, int64_t n) {
  struct Free { void operator()(float* p) const { std::free(p); } };
  struct Slot { std::unique_ptr<float, Free> data; int64_t size = 0; };
  static thread_local Slot slots[8];
  Slot& s = slots[slot];
  if (s.size < n) {
    s.size = (n + 15) / 16 * 16;
    s.data.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(s.size) * sizeof(float))));
    if (!s.data) std::abort();
  }
  return s.data.get();
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
