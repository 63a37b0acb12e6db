// The LM head over a few columns of each row: those that the sampler kept.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "gemm.h"
#include "logit_gradient.h"
#include "pool.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "sample_support.inc"

namespace {

constexpr int kLogits = 2;               // scratch slot
constexpr int64_t kGrain = int64_t{1} << 16;  // multiply-adds that are worth waking a thread for

struct Kept {
  const uint16_t* hidden;
  const uint16_t* weight;
  const float* bias;  // or null
  Temperatures temperatures;
  const int64_t* offsets;
  const int64_t* ids;
  int64_t rows, depth;

  int64_t grain() const { return kGrain * rows / (offsets[rows] * depth + 1) + 1; }
};

// Blocks of one row's kept columns: their rows of the weight, side by side, and their logits.
class Columns {
 public:
  explicit Columns(const Kept& kept) : kept_(kept), matrix_(static_cast<size_t>(kBlock * kept.depth)) {}

  // body(first, count, logits) for each block, ascending
  template <class Body>
  void each(int64_t r, const Body& body) {
    for (int64_t first = kept_.offsets[r]; first < kept_.offsets[r + 1]; first += kBlock) {
      int64_t count = std::min<int64_t>(kBlock, kept_.offsets[r + 1] - first);
      for (int64_t k = 0; k < count; ++k) {
        int64_t id = kept_.ids[first + k];
        std::copy_n(kept_.weight + id * kept_.depth, kept_.depth, matrix_.data() + k * kept_.depth);
        if (kept_.bias) bias_[k] = kept_.bias[id];
      }
      float* logits = scratch(kLogits, kBlock);
      gemm_nt(kept_.hidden + r * kept_.depth, kept_.depth, 1, matrix_.data(), kept_.depth, count, kept_.depth, logits,
              count, false);
      body(first, count, Scaled{logits, kept_.bias ? bias_ : nullptr, kept_.temperatures.of(r)});
    }
  }
  const uint16_t* matrix() const { return matrix_.data(); }

 private:
  const Kept& kept_;
  std::vector<uint16_t> matrix_;
  float bias_[kBlock];
};

int64_t place_in(const int64_t* ids, int64_t count, int64_t target) {
  const int64_t* found = std::lower_bound(ids, ids + count, target);
  return found != ids + count && *found == target ? found - ids : -1;
}

// dw[id] and dbias[id] go on with each row's gradients, rows ascending; threads share the hidden dimension.
void advance_weight(const Kept& kept, const uint16_t* dz, float* dw) {
  int64_t vectors = (kept.depth + kLanes - 1) / kLanes, pairs = kept.offsets[kept.rows];
  parallel_for(vectors, kGrain / (pairs * kLanes + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < kept.rows; ++r)
      for (int64_t at = kept.offsets[r]; at < kept.offsets[r + 1]; ++at) {
        F32x16 factor = F32x16::all(bf16_to_float(dz[at]));
        for (int64_t v = begin; v < end; ++v) {
          int part = static_cast<int>(std::min<int64_t>(kLanes, kept.depth - v * kLanes));
          float* own = dw + kept.ids[at] * kept.depth + v * kLanes;
          F32x16 sum = fma(factor, load_part_bf16(kept.hidden + r * kept.depth + v * kLanes, part),
                           load_part(own, part));
          store_part(keep_nan(sum, sum), own, part);
        }
      }
  });
}

}  // namespace

void kept_states(const uint16_t* hidden, const uint16_t* weight, const float* bias, const int64_t* targets,
                 const float* temperatures, float temperature, const int64_t* offsets, const int64_t* ids,
                 int64_t* out, int64_t rows, int64_t depth) {
  Kept kept = {hidden, weight, bias, {temperatures, temperature}, offsets, ids, rows, depth};
  parallel_for(rows, kept.grain(), [&](int64_t begin, int64_t end) {
    Columns columns(kept);
    for (int64_t r = begin; r < end; ++r) {
      LseState state;
      out[r * 6 + 5] = kNoTarget;
      columns.each(r, [&](int64_t first, int64_t count, const Scaled& scaled) {
        absorb(state, scaled, count);
        int64_t place = place_in(ids + first, count, targets[r]);
        if (place >= 0) out[r * 6 + 5] = float_to_bits(scaled.one(place));
      });
      store_state(state, out + r * 6);
    }
  });
}

void kept_gradients(const float* upstream, const uint16_t* hidden, const uint16_t* weight, const float* bias,
                    const int64_t* targets, const float* temperatures, float temperature, const float* lse,
                    const int64_t* offsets, const int64_t* ids, float* dhidden, float* dw, float* dbias,
                    int64_t rows, int64_t depth) {
  Kept kept = {hidden, weight, bias, {temperatures, temperature}, offsets, ids, rows, depth};
  std::fill_n(dhidden, rows * depth, 0.0f);
  std::vector<uint16_t> dz(static_cast<size_t>(offsets[rows]));
  parallel_for(rows, kept.grain(), [&](int64_t begin, int64_t end) {
    Columns columns(kept);
    for (int64_t r = begin; r < end; ++r) {
      columns.each(r, [&](int64_t first, int64_t count, const Scaled& scaled) {
        uint16_t* own = dz.data() + first;
        gradient_row(scaled, count, place_in(ids + first, count, targets[r]), upstream[r], lse[r], own);
        gemm_nn(own, count, 1, columns.matrix(), depth, depth, count, dhidden + r * depth, depth, true);
      });
      finish_row(dhidden + r * depth, nullptr, dhidden + r * depth, depth);
    }
  });
  if (dw) advance_weight(kept, dz.data(), dw);
  if (dbias)
    for (int64_t at = 0; at < offsets[rows]; ++at) {
      float sum = dbias[ids[at]] + bf16_to_float(dz[static_cast<size_t>(at)]);
      dbias[ids[at]] = sum == sum ? sum : bits_to_float(0x7fc00000u);
    }
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
