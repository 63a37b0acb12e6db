#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "gemm.h"
#include "logit_gradient.h"
#include "pool.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "logprob.inc"

namespace {

constexpr int kLogits = 2;           // scratch slot
constexpr int64_t kSlab = 2048;      // columns whose logit gradients are held at a time
constexpr int64_t kBiasGrain = 1 << 16;

struct Head {
  const uint16_t* hidden;
  const uint16_t* weight;
  const float* bias;  // or null
  const int64_t* targets;
  Temperatures temperatures;
  int64_t depth;

  // The logits of rows r.. and columns c.., in the calling thread's scratch.
  const float* logits(int64_t r, int64_t rows, int64_t c, int64_t columns) const {
    float* tile = scratch(kLogits, rows * columns);
    gemm_nt(hidden + r * depth, depth, rows, weight + c * depth, depth, columns, depth, tile, columns, false);
    return tile;
  }
  Scaled scaled(const float* row_of_logits, int64_t r, int64_t c) const {
    return {row_of_logits, bias ? bias + c : nullptr, temperatures.of(r)};
  }
};

// dbias[j] += dz[r][j], r ascending
void advance_bias(const uint16_t* dz, int64_t stride, int64_t rows, int64_t columns, float* dbias) {
  int64_t vectors = (columns + kLanes - 1) / kLanes;
  parallel_for(vectors, kBiasGrain / (rows * kLanes + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      int64_t j = v * kLanes;
      int part = static_cast<int>(std::min<int64_t>(kLanes, columns - j));
      F32x16 sum = load_part(dbias + j, part);
      for (int64_t r = 0; r < rows; ++r) sum = sum + load_part_bf16(dz + r * stride + j, part);
      store_part(keep_nan(sum, sum), dbias + j, part);
    }
  });
}

}  // namespace

void head_states(const uint16_t* hidden, const uint16_t* weight, const float* bias, const int64_t* targets,
                 const float* temperatures, float temperature, int64_t* out, int64_t rows, int64_t columns,
                 int64_t depth) {
  Head head = {hidden, weight, bias, targets, {temperatures, temperature}, depth};
  std::vector<LseState> states(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) out[r * 6 + 5] = kNoTarget;
  std::mutex merging;
  gemm_split(rows, columns, depth, [&](int64_t row, int64_t height, int64_t column, int64_t width) {
    gemm_tiles(row, height, column, width, [&](int64_t r, int64_t tall, int64_t c, int64_t wide) {
      const float* tile = head.logits(r, tall, c, wide);
      for (int64_t i = r; i < r + tall; ++i) {
        Scaled scaled = head.scaled(tile + (i - r) * wide, i, c);
        LseState part;
        absorb(part, scaled, wide);
        int64_t target = targets[i] - c;
        // only one tile holds the target; states merge to the same integers in whatever order tiles end
        if (target >= 0 && target < wide) out[i * 6 + 5] = float_to_bits(scaled.one(target));
        std::lock_guard<std::mutex> lock(merging);
        states[static_cast<size_t>(i)].merge(part);
      }
    });
  });
  for (int64_t r = 0; r < rows; ++r) store_state(states[static_cast<size_t>(r)], out + r * 6);
}

void head_gradients(const float* upstream, const uint16_t* hidden, const uint16_t* weight, const float* bias,
                    const int64_t* targets, const float* temperatures, float temperature, const float* lse,
                    float* dhidden, float* dw, float* dbias, int64_t rows, int64_t columns, int64_t depth) {
  Head head = {hidden, weight, bias, targets, {temperatures, temperature}, depth};
  std::fill_n(dhidden, rows * depth, 0.0f);
  int64_t stride = std::min(kSlab, columns);
  std::vector<uint16_t> slab(static_cast<size_t>(rows * stride));
  uint16_t* dz = slab.data();
  for (int64_t start = 0; start < columns; start += kSlab) {
    int64_t slab_columns = std::min(kSlab, columns - start);
    gemm_split(rows, slab_columns, depth, [&](int64_t row, int64_t height, int64_t column, int64_t width) {
      gemm_tiles(row, height, column, width, [&](int64_t r, int64_t tall, int64_t c, int64_t wide) {
        const float* tile = head.logits(r, tall, start + c, wide);
        for (int64_t i = r; i < r + tall; ++i)
          gradient_row(head.scaled(tile + (i - r) * wide, i, start + c), wide, targets[i] - start - c, upstream[i],
                       lse[i], dz + i * stride + c);
      });
    });
    // chains over columns go on from slab to slab, chains over tokens from call to call
    gemm_split(rows, depth, slab_columns, [&](int64_t r, int64_t tall, int64_t c, int64_t wide) {
      gemm_nn(dz + r * stride, stride, tall, weight + start * depth + c, depth, wide, slab_columns,
              dhidden + r * depth + c, depth, true);
    });
    if (dw)
      gemm_split(slab_columns, depth, rows, [&](int64_t r, int64_t tall, int64_t c, int64_t wide) {
        float* own = dw + (start + r) * depth + c;
        gemm_tn(dz + r, stride, tall, hidden + c, depth, wide, rows, own, depth, true);
        for (int64_t i = 0; i < tall; ++i) finish_row(own + i * depth, nullptr, own + i * depth, wide);
      });
    if (dbias) advance_bias(dz, stride, rows, slab_columns, dbias + start);
  }
  for (int64_t r = 0; r < rows; ++r) finish_row(dhidden + r * depth, nullptr, dhidden + r * depth, depth);
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
