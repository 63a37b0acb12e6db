#include <cstdint>
#include <vector>

#include "exact_sum.h"
#include "pool.h"
#include "spans.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "sample.inc"

namespace {

// 64 random bits of (seed, position): Philox4x32 with 10 rounds.
uint64_t random_bits(uint64_t seed, uint64_t position) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t a = static_cast<uint32_t>(position), b = static_cast<uint32_t>(position >> 32), c = 0, d = 0;
  for (int round = 0; round < 10; ++round) {
    uint64_t left = uint64_t{0xD2511F53u} * a, right = uint64_t{0xCD9E8D57u} * c;
    a = static_cast<uint32_t>(right >> 32) ^ b ^ k0;
    b = static_cast<uint32_t>(right);
    c = static_cast<uint32_t>(left >> 32) ^ d ^ k1;
    d = static_cast<uint32_t>(left);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<uint64_t>(b) << 32 | a;
}

// The first column of n whose running total exceeds `rest`, which is below the total of them all.
int64_t find(const Scaled& row, int64_t n, int64_t top, Wide rest) {
  Terms terms;
  for (int64_t j = 0; j < n; j += kBlock) {
    int part = static_cast<int>(n - j < kBlock ? n - j : kBlock);
    int32_t highest = make_terms(row.from(j), part, terms);
    if (j + part < n) {
      LseState block;
      absorb_terms(block, terms, part, highest);
      Wide total = weight_of(block, top);
      if (rest >= total) { rest -= total; continue; }
    }
    for (int k = 0; k < part; ++k) {
      Wide weight = weight_of_term(terms.q[k], terms.i[k], top);
      if (rest < weight) return j + k;
      rest -= weight;
    }
  }
  return -1;
}

int64_t draw(const Spans& spans, int64_t r, const LseState& whole, uint64_t bits) {
  Wide rest = scale(weight_of(whole, whole.top), bits);
  for (int64_t s = 0; s < spans.count(); ++s) {
    Wide total = weight_of(spans.part(r, s), whole.top);
    if (rest < total) return s * kSpan + find(spans.row(r).from(s * kSpan), spans.width(s), whole.top, rest);
    rest -= total;
  }
  return -1;
}

int64_t lowest_id_of_maximum(const float* logits, int64_t columns) {
  int64_t best = 0;
  for (int64_t j = 1; j < columns; ++j) best = logits[j] > logits[best] ? j : best;
  return best;
}

}  // namespace

void sample(const float* logits, int64_t stride, int64_t rows, int64_t columns, const float* temperatures,
            float temperature, const int64_t* seeds, const int64_t* positions, int64_t* tokens, float* logp) {
  Spans spans(logits, stride, rows, columns, {temperatures, temperature});
  parallel_for(rows, kDrawGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      LseState whole = spans.whole(r);
      tokens[r] = -1;
      logp[r] = 0.0f;
      if (!whole.finite()) continue;
      bool greedy = (temperatures ? temperatures[r] : temperature) == 0.0f;
      tokens[r] = greedy ? lowest_id_of_maximum(logits + r * stride, columns)
                         : draw(spans, r, whole,
                                random_bits(static_cast<uint64_t>(seeds[r]), static_cast<uint64_t>(positions[r])));
      logp[r] = log_probability(lse64(whole), spans.row(r).one(tokens[r]));
    }
  });
}

void sample_kept(const float* logits, int64_t stride, int64_t rows, const float* temperatures, float temperature,
                 const int64_t* seeds, const int64_t* positions, const int64_t* offsets, const int64_t* ids,
                 int64_t* tokens, float* logp) {
  Temperatures each = {temperatures, temperature};
  parallel_for(rows, kDrawGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> z;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t* kept = ids + offsets[r];
      int64_t n = offsets[r + 1] - offsets[r];
      Scaled row = gather({logits + r * stride, nullptr, each.of(r)}, kept, n, z);
      LseState whole;
      absorb(whole, row, n);
      tokens[r] = -1;
      logp[r] = 0.0f;
      if (!whole.finite()) continue;
      uint64_t bits = random_bits(static_cast<uint64_t>(seeds[r]), static_cast<uint64_t>(positions[r]));
      int64_t place = find(row, n, whole.top, scale(weight_of(whole, whole.top), bits));
      tokens[r] = kept[place];
      logp[r] = log_probability(lse64(whole), z[static_cast<size_t>(place)]);
    }
  });
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
