#include <algorithm>
#include <cstdint>

#include "gemm.h"
#include "pool.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "linear.inc"

namespace {

constexpr int kTree = 2;  // scratch slot
constexpr int64_t kBiasGrain = 1 << 16;

struct Inputs {
  const uint16_t* x;
  int64_t x_stride;
  const uint16_t* w;
  int64_t w_stride;
};

// The sum of `segments` neighbouring segments into out [rows, columns]; one more tile of scratch per level follows.
void segment_tree(const Inputs& in, int64_t rows, int64_t columns, int64_t depth, int64_t segments, float* out) {
  if (segments == 1) {
    gemm_nt(in.x, in.x_stride, rows, in.w, in.w_stride, columns, depth, out, columns, false);
    return;
  }
  int64_t half = segments / 2, size = rows * columns;
  segment_tree(in, rows, columns, depth, half, out);
  Inputs right = {in.x + half * depth, in.x_stride, in.w + half * depth, in.w_stride};
  segment_tree(right, rows, columns, depth, half, out + size);
  for (int64_t i = 0; i < size; i += kLanes) {
    int part = static_cast<int>(std::min<int64_t>(kLanes, size - i));
    store_part(load_part(out + i, part) + load_part(out + size + i, part), out + i, part);
  }
}

template <class Out>
void forward(const Inputs& in, const uint16_t* bias, Out* y, int64_t m, int64_t n, int64_t k, int64_t segments) {
  int64_t levels = 1;
  while ((int64_t{1} << (levels - 1)) < segments) ++levels;
  gemm_split(m, n, k, [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
    gemm_tiles(row, rows, column, columns, [&](int64_t r, int64_t tall, int64_t c, int64_t wide) {
      float* sum = scratch(kTree, levels * tall * wide);
      Inputs own = {in.x + r * in.x_stride, in.x_stride, in.w + c * in.w_stride, in.w_stride};
      segment_tree(own, tall, wide, k / segments, segments, sum);
      for (int64_t i = 0; i < tall; ++i)
        finish_row(sum + i * wide, bias ? bias + c : nullptr, y + (r + i) * n + c, wide);
    });
  });
}

template <class Out>
void dgrad(const uint16_t* dy, int64_t dy_stride, const uint16_t* w, int64_t w_stride, Out* dx, int64_t m, int64_t n,
           int64_t k) {
  gemm_split(m, k, n, [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
    gemm_tiles(row, rows, column, columns, [&](int64_t r, int64_t tall, int64_t c, int64_t wide) {
      float* sum = scratch(kTree, tall * wide);
      gemm_nn(dy + r * dy_stride, dy_stride, tall, w + c, w_stride, wide, n, sum, wide, false);
      for (int64_t i = 0; i < tall; ++i) finish_row(sum + i * wide, nullptr, dx + (r + i) * k + c, wide);
    });
  });
}

}  // namespace

void linear_forward(const uint16_t* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, const uint16_t* bias,
                    uint16_t* y, int64_t rows, int64_t n, int64_t k, int64_t segments) {
  forward({x, x_stride, w, w_stride}, bias, y, rows, n, k, segments);
}
void linear_forward_f32(const uint16_t* x, int64_t x_stride, const uint16_t* w, int64_t w_stride,
                        const uint16_t* bias, float* y, int64_t rows, int64_t n, int64_t k, int64_t segments) {
  forward({x, x_stride, w, w_stride}, bias, y, rows, n, k, segments);
}
void linear_dgrad(const uint16_t* dy, int64_t dy_stride, const uint16_t* w, int64_t w_stride, uint16_t* dx,
                  int64_t rows, int64_t n, int64_t k) {
  dgrad(dy, dy_stride, w, w_stride, dx, rows, n, k);
}
void linear_dgrad_f32(const uint16_t* dy, int64_t dy_stride, const uint16_t* w, int64_t w_stride, float* dx,
                      int64_t rows, int64_t n, int64_t k) {
  dgrad(dy, dy_stride, w, w_stride, dx, rows, n, k);
}

void linear_wgrad(const uint16_t* dy, int64_t dy_stride, const uint16_t* x, int64_t x_stride, float* dw,
                  int64_t rows, int64_t n, int64_t k) {
  gemm_split(n, k, rows, [&](int64_t row, int64_t tall, int64_t column, int64_t wide) {
    gemm_tiles(row, tall, column, wide, [&](int64_t r, int64_t height, int64_t c, int64_t width) {
      float* own = dw + r * k + c;
      gemm_tn(dy + r, dy_stride, height, x + c, x_stride, width, rows, own, k, true);
      for (int64_t i = 0; i < height; ++i) finish_row(own + i * k, nullptr, own + i * k, width);
    });
  });
}

void linear_bias_grad(const uint16_t* dy, int64_t dy_stride, float* db, int64_t rows, int64_t n) {
  int64_t vectors = (n + kLanes - 1) / kLanes;
  parallel_for(vectors, kBiasGrain / (rows * kLanes + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      int64_t i = v * kLanes;
      int part = static_cast<int>(std::min<int64_t>(kLanes, n - i));
      F32x16 sum = load_part(db + i, part);
      for (int64_t r = 0; r < rows; ++r) sum = sum + load_part_bf16(dy + r * dy_stride + i, part);
      store_part(keep_nan(sum, sum), db + i, part);
    }
  });
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
