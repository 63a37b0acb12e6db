// The states of all rows of a matrix of logits, by spans of columns, so that one long row also keeps every
// thread busy. Spans are free to choose: merging states gives the same integers for any of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lse.h"
#include "pool.h"

namespace samebits {
namespace SAMEBITS_ISA {

constexpr int64_t kSpan = 8192;
constexpr int64_t kRowGrain = 256;      // rows of a few divisions each
constexpr int64_t kDrawGrain = 16;       // rows of which a few thousand columns are looked at again
constexpr int64_t kColumnGrain = 16384;  // logits that are worth waking a thread for

class Spans {
 public:
  Spans(const float* logits, int64_t stride, int64_t rows, int64_t columns, Temperatures temperatures)
      : logits_(logits), stride_(stride), columns_(columns), temperatures_(temperatures),
        count_((columns + kSpan - 1) / kSpan), states_(static_cast<size_t>(rows * count_)) {
    int64_t grain = kColumnGrain / (std::min(columns, kSpan) + 1) + 1;
    parallel_for(rows * count_, grain, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        int64_t start = (s % count_) * kSpan;
        absorb(states_[static_cast<size_t>(s)], row(s / count_).from(start), width(s % count_));
      }
    });
  }
  int64_t count() const { return count_; }
  int64_t width(int64_t span) const { return std::min(kSpan, columns_ - span * kSpan); }
  Scaled row(int64_t r) const { return {logits_ + r * stride_, nullptr, temperatures_.of(r)}; }
  const LseState& part(int64_t r, int64_t span) const { return states_[static_cast<size_t>(r * count_ + span)]; }
  LseState whole(int64_t r) const {
    LseState state = part(r, 0);
    for (int64_t s = 1; s < count_; ++s) state.merge(part(r, s));
    return state;
  }

 private:
  const float* logits_;
  int64_t stride_, columns_;
  Temperatures temperatures_;
  int64_t count_;
  std::vector<LseState> states_;
};

}  // namespace SAMEBITS_ISA
}  // namespace samebits
