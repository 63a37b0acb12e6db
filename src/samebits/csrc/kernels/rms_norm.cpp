#include <cmath>
#include <cstdint>

#include "lane_dot.h"
#include "pool.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "rms_norm.inc"

namespace {

constexpr int64_t kGrain = 4096;

template <class Body>
void each_vector(int64_t width, Body body) {
  for (int64_t i = 0; i < width; i += kLanes) body(i, static_cast<int>(width - i < kLanes ? width - i : kLanes));
}

}  // namespace

void rms_norm_forward(const uint16_t* x, int64_t x_stride, const uint16_t* residual, int64_t residual_stride,
                      const uint16_t* weight, float eps, uint16_t* y, uint16_t* sum_out, float* scale_out,
                      int64_t rows, int64_t width) {
  parallel_for(rows, kGrain / width + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const uint16_t* row = x + r * x_stride;
      if (residual) {
        const uint16_t* res = residual + r * residual_stride;
        uint16_t* sum = sum_out + r * width;
        each_vector(width, [&](int64_t i, int n) {
          store_part_bf16(load_part_bf16(row + i, n) + load_part_bf16(res + i, n), sum + i, n);
        });
        row = sum;
      }
      auto element = [&](int64_t i, int n) { return load_part_bf16(row + i, n); };
      float mean = lane_dot(width, element, element) / static_cast<float>(width);
      float scale = 1.0f / std::sqrt(mean + eps);
      if (scale_out) scale_out[r] = scale;
      F32x16 s = F32x16::all(scale);
      each_vector(width, [&](int64_t i, int n) {
        F32x16 out = (load_part_bf16(row + i, n) * s) * load_part_bf16(weight + i, n);
        store_part_bf16(out, y + r * width + i, n);
      });
    }
  });
}

void rms_norm_backward(const uint16_t* dy, int64_t dy_stride, const uint16_t* x, int64_t x_stride,
                       const uint16_t* weight, const float* scale, const uint16_t* dsum, int64_t dsum_stride,
                       uint16_t* dx, float* dw, int64_t rows, int64_t width) {
  parallel_for(rows, kGrain / width + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const uint16_t* g = dy + r * dy_stride;
      const uint16_t* row = x + r * x_stride;
      auto scaled = [&](int64_t i, int n) { return load_part_bf16(g + i, n) * load_part_bf16(weight + i, n); };
      auto element = [&](int64_t i, int n) { return load_part_bf16(row + i, n); };
      float dot = lane_dot(width, scaled, element);
      F32x16 k = F32x16::all(((dot * scale[r]) * scale[r]) / static_cast<float>(width));
      F32x16 s = F32x16::all(scale[r]);
      each_vector(width, [&](int64_t i, int n) {
        F32x16 out = (scaled(i, n) - element(i, n) * k) * s;
        if (dsum) out = out + load_part_bf16(dsum + r * dsum_stride + i, n);
        store_part_bf16(out, dx + r * width + i, n);
      });
    }
  });
  // every column is one chain over the rows, ascending, so a batch cut into pieces gives the same bits
  int64_t vectors = (width + kLanes - 1) / kLanes;
  parallel_for(vectors, kGrain / (rows + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      int64_t i = v * kLanes;
      int n = static_cast<int>(width - i < kLanes ? width - i : kLanes);
      F32x16 acc = load_part(dw + i, n);
      for (int64_t r = 0; r < rows; ++r) {
        F32x16 normed = load_part_bf16(x + r * x_stride + i, n) * F32x16::all(scale[r]);
        acc = fma(load_part_bf16(dy + r * dy_stride + i, n), normed, acc);
      }
      store_part(keep_nan(acc, acc), dw + i, n);
    }
  });
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
