#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "exact_sum.h"
#include "pool.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "sample_support.inc"

namespace {

constexpr int64_t kSupportGrain = 1 << 14;  // logits that are worth waking a thread for
constexpr int64_t kFirstSorted = 64;

// The place of a scaled logit in its row's order: ascending numbers are descending logits, then ascending ids.
inline uint64_t place_of(float z, int64_t id) {
  uint32_t bits = float_to_bits(z == 0.0f ? 0.0f : z);
  uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint64_t>(id);
}

// A row in its order, sorted only as far as it is looked at, with the terms there. -inf has no place.
class Ranking {
 public:
  Ranking(const Scaled& row, int64_t columns) : row_(row) {
    places_.reserve(static_cast<size_t>(columns));
    for (int64_t j = 0; j < columns; ++j) {
      float z = row.one(j);
      if (z != z) has_nan_ = true;
      if (z != -std::numeric_limits<float>::infinity()) places_.push_back(place_of(z, j));
    }
  }
  int64_t size() const { return static_cast<int64_t>(places_.size()); }
  // Whether the row has a distribution; the largest logit's term is in its highest window.
  bool finite() {
    if (has_nan_ || places_.empty()) return false;
    LseState state;
    state.top = term(0).second >> kWindowShift;
    return state.finite();
  }
  uint64_t place(int64_t n) {
    while (sorted_ <= n) {
      auto from = places_.begin() + sorted_;
      sorted_ = std::min(size(), std::max(kFirstSorted, 4 * sorted_));
      auto to = places_.begin() + sorted_;
      if (to != places_.end()) std::nth_element(from, to, places_.end());
      std::sort(from, to);
    }
    return places_[static_cast<size_t>(n)];
  }
  // (q, i) of the term at place n
  std::pair<int32_t, int32_t> term(int64_t n) {
    if (n < first_ || n >= first_ + count_) {
      first_ = n;
      count_ = static_cast<int>(std::min<int64_t>(size() - n, n ? kBlock : kLanes));
      float z[kBlock];
      for (int k = 0; k < count_; ++k) z[k] = row_.one(static_cast<int64_t>(place(n + k) & 0xffffffffu));
      make_terms({z, nullptr, 1.0f}, count_, terms_);
    }
    return {terms_.q[n - first_], terms_.i[n - first_]};
  }

 private:
  Scaled row_;
  std::vector<uint64_t> places_;
  bool has_nan_ = false;
  int64_t sorted_ = 0, first_ = 0;
  int count_ = 0;
  Terms terms_;
};

// Whether one term is below min_p times another, exactly: 24-bit significands, products of 48 bits.
bool below(std::pair<int32_t, int32_t> one, float min_p, std::pair<int32_t, int32_t> largest) {
  uint32_t bits = float_to_bits(min_p);
  int32_t exponent = static_cast<int32_t>(bits >> 23);
  int64_t factor = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0u);
  int64_t shift = int64_t{one.second} - largest.second - ((exponent ? exponent : 1) - 150);
  int64_t left = one.first, right = factor * largest.first;
  return shift < 0 || (shift < 32 && (left << shift) < right);
}

// How many of the first `limit` places min-p leaves: all before the first that is below.
int64_t after_min_p(Ranking& order, int64_t limit, float min_p) {
  if (min_p == 0.0f) return limit;
  auto largest = order.term(0);
  int64_t n = 1;
  while (n < limit && !below(order.term(n), min_p, largest)) ++n;
  return n;
}

// The sum of the first `limit` places, `top` being the row's highest window.
Wide mass_of(Ranking& order, const Scaled& row, int64_t columns, int64_t limit, int64_t top) {
  if (limit == order.size()) {
    LseState whole;
    absorb(whole, row, columns);
    return weight_of(whole, top);
  }
  Wide sum = 0;
  for (int64_t n = 0; n < limit; ++n) sum += weight_of_term(order.term(n).first, order.term(n).second, top);
  return sum;
}

// The smallest number of places, at least one, whose sum reaches top_p of the sum of the first `limit`.
int64_t after_top_p(Ranking& order, const Scaled& row, int64_t columns, int64_t limit, float top_p) {
  if (top_p >= 1.0f) return limit;
  int64_t top = order.term(0).second >> kWindowShift;
  uint64_t part = static_cast<uint64_t>(static_cast<double>(top_p) * 0x1p+64);
  Wide wanted = scale_up(mass_of(order, row, columns, limit, top), part);
  Wide sum = 0;
  for (int64_t n = 0; n < limit; ++n) {
    sum += weight_of_term(order.term(n).first, order.term(n).second, top);
    if (sum >= wanted) return n + 1;
  }
  return limit;
}

}  // namespace

void support_cuts(const float* logits, int64_t stride, int64_t rows, int64_t columns, const float* temperatures,
                  float temperature, const int64_t* top_k, const float* top_p, const float* min_p, int64_t* counts,
                  int64_t* cuts) {
  Temperatures each = {temperatures, temperature};
  parallel_for(rows, kSupportGrain / columns + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Scaled row = {logits + r * stride, nullptr, each.of(r)};
      Ranking order(row, columns);
      counts[r] = cuts[r] = -1;
      if (!order.finite()) continue;
      int64_t limit = after_min_p(order, order.size(), min_p[r]);
      if (top_k[r] > 0) limit = std::min(limit, top_k[r]);
      counts[r] = after_top_p(order, row, columns, limit, top_p[r]);
      cuts[r] = static_cast<int64_t>(order.place(counts[r] - 1));
    }
  });
}

void support_ids(const float* logits, int64_t stride, int64_t rows, int64_t columns, const float* temperatures,
                 float temperature, const int64_t* offsets, const int64_t* cuts, int64_t* ids) {
  Temperatures each = {temperatures, temperature};
  parallel_for(rows, kSupportGrain / columns + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Scaled row = {logits + r * stride, nullptr, each.of(r)};
      int64_t* out = ids + offsets[r];
      for (int64_t j = 0; j < columns && out < ids + offsets[r + 1]; ++j)
        if (place_of(row.one(j), j) <= static_cast<uint64_t>(cuts[r])) *out++ = j;
    }
  });
}

void kept_logprob(const float* logits, int64_t stride, int64_t rows, const int64_t* targets, int64_t n,
                  const float* temperatures, float temperature, const int64_t* offsets, const int64_t* ids,
                  float* logp) {
  Temperatures each = {temperatures, temperature};
  parallel_for(rows, kSupportGrain / 512, [&](int64_t begin, int64_t end) {
    std::vector<float> z;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t *kept = ids + offsets[r], *last = ids + offsets[r + 1];
      LseState whole;
      absorb(whole, gather({logits + r * stride, nullptr, each.of(r)}, kept, last - kept, z), last - kept);
      double lse = lse64(whole);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t* found = std::lower_bound(kept, last, targets[r * n + j]);
        bool known = found != last && *found == targets[r * n + j];
        logp[r * n + j] = known ? log_probability(lse, z[static_cast<size_t>(found - kept)])
                                : -std::numeric_limits<float>::infinity();
      }
    }
  });
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
