// Operators without a reduction in the forward pass: rotary, SwiGLU, embedding.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "primitives.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "elementwise.inc"

namespace {

constexpr int64_t kGrain = 4096;

template <class Body>
void each_vector(int64_t width, Body body) {
  for (int64_t i = 0; i < width; i += kLanes) body(i, static_cast<int>(std::min<int64_t>(width - i, kLanes)));
}

}  // namespace

bool rotary(const uint16_t* x, int64_t token_stride, int64_t head_stride, const int64_t* positions,
            const float* cos, const float* sin, uint16_t* y, int64_t tokens, int64_t heads, int64_t width,
            int64_t table_rows, bool inverse) {
  for (int64_t t = 0; t < tokens; ++t)
    if (positions[t] < 0 || positions[t] >= table_rows) return false;
  int64_t half = width / 2;
  parallel_for(tokens, kGrain / (heads * width) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const uint16_t* in = x + t * token_stride + h * head_stride;
        uint16_t* out = y + (t * heads + h) * width;
        const float* c = cos + positions[t] * half;
        const float* s = sin + positions[t] * half;
        each_vector(half, [&](int64_t i, int n) {
          F32x16 x1 = load_part_bf16(in + i, n), x2 = load_part_bf16(in + half + i, n);
          F32x16 cv = load_part(c + i, n), sv = load_part(s + i, n);
          if (inverse) sv = sv * F32x16::all(-1.0f);
          store_part_bf16(x1 * cv - x2 * sv, out + i, n);
          store_part_bf16(x2 * cv + x1 * sv, out + half + i, n);
        });
      }
  });
  return true;
}

void swiglu_forward(const uint16_t* gate_up, int64_t stride, uint16_t* y, int64_t rows, int64_t width) {
  parallel_for(rows, kGrain / width + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      each_vector(width, [&](int64_t i, int n) {
        F32x16 gate = load_part_bf16(gate_up + r * stride + i, n);
        F32x16 up = load_part_bf16(gate_up + r * stride + width + i, n);
        store_part_bf16((gate * sigmoid(gate)) * up, y + r * width + i, n);
      });
  });
}

void swiglu_backward(const uint16_t* dy, int64_t dy_stride, const uint16_t* gate_up, int64_t stride,
                     uint16_t* grad, int64_t rows, int64_t width) {
  const F32x16 one = F32x16::all(1.0f);
  parallel_for(rows, kGrain / width + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      each_vector(width, [&](int64_t i, int n) {
        F32x16 gate = load_part_bf16(gate_up + r * stride + i, n);
        F32x16 up = load_part_bf16(gate_up + r * stride + width + i, n);
        F32x16 d = load_part_bf16(dy + r * dy_stride + i, n);
        F32x16 s = sigmoid(gate);
        store_part_bf16(((d * up) * s) * (one + gate * (one - s)), grad + r * 2 * width + i, n);
        store_part_bf16(d * (gate * s), grad + r * 2 * width + width + i, n);
      });
  });
}

void embedding_forward(const int64_t* ids, const uint16_t* weight, uint16_t* y, int64_t tokens, int64_t rows,
                       int64_t width, int64_t start) {
  size_t bytes = static_cast<size_t>(width) * sizeof(uint16_t);
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t local = ids[t] - start;
    if (local >= 0 && local < rows)
      std::memcpy(y + t * width, weight + local * width, bytes);
    else
      std::memset(y + t * width, 0, bytes);
  }
}

void embedding_backward(const int64_t* ids, const uint16_t* dy, int64_t dy_stride, float* dw, int64_t tokens,
                        int64_t rows, int64_t width, int64_t start) {
  // columns are split, tokens are not: each element of dw is one chain over the tokens
  int64_t vectors = (width + kLanes - 1) / kLanes;
  parallel_for(vectors, kGrain / (tokens + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < tokens; ++t) {
      int64_t local = ids[t] - start;
      if (local < 0 || local >= rows) continue;
      for (int64_t v = begin; v < end; ++v) {
        int64_t i = v * kLanes;
        int n = static_cast<int>(std::min<int64_t>(width - i, kLanes));
        float* out = dw + local * width + i;
        F32x16 sum = load_part(out, n) + load_part_bf16(dy + t * dy_stride + i, n);
        store_part(keep_nan(sum, sum), out, n);
      }
    }
  });
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
