#include <cstdint>

#include "lse.h"
#include "pool.h"
#include "spans.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "sample.inc"

namespace {

using Wide = unsigned __int128;

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

// The sum of a part of a row, in units of the lowest window that the row keeps.
Wide weight_of(LseState part, int64_t top) {
  part.raise(top);
  Wide sum = 0;
  for (int64_t window : part.sum) sum = (sum << 16) + static_cast<uint64_t>(window);
  return sum;
}

Wide weight_of_term(const Terms& terms, int j, int64_t top) {
  int64_t lowest = (top - (kWindows - 1)) << kWindowShift;
  int64_t shift = terms.i[j] - lowest;
  return shift < 0 ? 0 : static_cast<Wide>(static_cast<uint32_t>(terms.q[j])) << shift;
}

// floor(sum * bits / 2^64)
Wide scale(Wide sum, uint64_t bits) {
  uint64_t high = static_cast<uint64_t>(sum >> 64), low = static_cast<uint64_t>(sum);
  return static_cast<Wide>(high) * bits + ((static_cast<Wide>(low) * bits) >> 64);
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
      Wide weight = weight_of_term(terms, k, top);
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

}  // namespace SAMEBITS_ISA
}  // namespace samebits
