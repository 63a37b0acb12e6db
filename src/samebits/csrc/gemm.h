// Matrix products in the arithmetic fma32: every output element is one chain acc = fma(a, b, acc), k ascending,
// from +0 or (accumulate) from the value that `c` holds. Blocking never touches that chain: between blocks of K
// the accumulators rest in `c` as fp32. So the bits depend on nothing but the operands.
//
// All of these run on the calling thread with its own scratch memory, and may be called inside parallel_for.
// Matrices are bf16 with unit inner stride; strides are in elements. c [m][n] is fp32 with rows c_stride apart.
// A NaN in `c` carries any payload: callers make it canonical where they let it out (finish_row does).
#pragma once

#include <cstdint>
#include <functional>

#include "vec.h"

namespace samebits {
namespace SAMEBITS_ISA {

// c[m, n] = chain over k of a[m, k] * b[n, k]: y = x W^T, with W [N, K] as checkpoints hold it.
void gemm_nt(const uint16_t* a, int64_t a_stride, int64_t m, const uint16_t* b, int64_t b_stride, int64_t n,
             int64_t k, float* c, int64_t c_stride, bool accumulate);
// c[m, n] = chain over k of a[m, k] * b[k, n]: dx = dy W.
void gemm_nn(const uint16_t* a, int64_t a_stride, int64_t m, const uint16_t* b, int64_t b_stride, int64_t n,
             int64_t k, float* c, int64_t c_stride, bool accumulate);
// c[m, n] = chain over k of a[k, m] * b[k, n]: dw = dy^T x, k running over tokens.
void gemm_tn(const uint16_t* a, int64_t a_stride, int64_t m, const uint16_t* b, int64_t b_stride, int64_t n,
             int64_t k, float* c, int64_t c_stride, bool accumulate);

// A tile of output holds at most this many elements, so that everything stays in a core's own cache.
constexpr int64_t kTileRows = 224;
constexpr int64_t kTileColumns = 512;
constexpr int64_t kTileSize = kTileRows * kTileColumns;

// body(row, rows, column, columns) over a partition of m x n output elements among the threads, one part where
// waking a thread would cost more than it saves. k is the depth of the product that body computes.
using Part = std::function<void(int64_t row, int64_t rows, int64_t column, int64_t columns)>;
void gemm_split(int64_t m, int64_t n, int64_t k, const Part& body);
// body over the tiles of one part, on the calling thread.
void gemm_tiles(int64_t row, int64_t rows, int64_t column, int64_t columns, const Part& body);

// n values of a finished row: + bias where there is one (bf16), NaN canonical; as bf16 or as fp32.
void finish_row(const float* sum, const uint16_t* bias, uint16_t* y, int64_t n);
void finish_row(const float* sum, const uint16_t* bias, float* y, int64_t n);

// 64-byte aligned floats of the calling thread, at least n; the contents live until the thread's next call
// with the same slot. gemm_* use slots 0 and 1.
float* scratch(int slot, int64_t n);

}  // namespace SAMEBITS_ISA
}  // namespace samebits
