#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "attention_call.h"
#include "attention_tiles.h"
#include "lane_dot.h"
#include "pool.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "attention.inc"

namespace {

constexpr int kRows = 66;  // query rows (position, head of the group) between two visits of a dK, dV tile
constexpr int64_t kWorkPerThread = 1 << 18;

// One sequence and one kv head: the sole owner of its dQ, dK and dV.
class Owner {
 public:
  void run(const AttentionGradients& call, int64_t sequence, int64_t head) {
    call_ = &call;
    sequence_ = sequence;
    head_ = head;
    const AttentionCall& f = call.forward;
    group_ = static_cast<int>(f.group());
    dim_ = static_cast<int>(f.head_dim);
    width_ = padded(dim_);
    rows_ = f.rows(sequence) * group_;
    reserve();
    for (int64_t r = 0; r < rows_; ++r) load_row(r);
    int64_t keys = f.keys(sequence);
    for (int64_t tile = 0; tile < keys; tile += kTile) {
      int n = static_cast<int>(std::min<int64_t>(kTile, keys - tile));
      load_tile(tile, n);
      for (int64_t r = first_row(tile); r < rows_; r += kRows)
        block(r, static_cast<int>(std::min<int64_t>(kRows, rows_ - r)), tile, n);
      store_tile(tile, n);
    }
    for (int64_t r = 0; r < rows_; ++r) finish(dq_ + r * width_, call.scale, call.dq + output_row(r) * dim_);
  }

 private:
  void reserve() {
    int64_t rows = rows_ * width_, tile = kTile * width_, block = kRows * kTile;
    int64_t size = 3 * rows + 3 * rows_ + 5 * tile + 2 * block;
    if (static_cast<int64_t>(memory_.size()) < size) memory_.resize(size);
    float* next = memory_.data();
    auto take = [&](int64_t n) { next += n; return next - n; };
    q_ = take(rows), dout_ = take(rows), dq_ = take(rows);
    largest_ = take(rows_), inverse_ = take(rows_), delta_ = take(rows_);
    keys_ = take(tile), keys_across_ = take(tile), values_across_ = take(tile), dk_ = take(tile), dv_ = take(tile);
    p_ = take(block), ds_ = take(block);
    std::fill(dq_, dq_ + rows, 0.0f);
    positions_.resize(rows_);
  }

  int64_t token(int64_t r) const { return call_->forward.q_offsets[sequence_] + r / group_; }
  int64_t output_row(int64_t r) const { return token(r) * call_->forward.heads + head_ * group_ + r % group_; }
  int64_t first_row(int64_t key) const {
    return std::lower_bound(positions_.begin(), positions_.end(), key) - positions_.begin();
  }

  void load_row(int64_t r) {
    const AttentionCall& f = call_->forward;
    int64_t head = head_ * group_ + r % group_, row = output_row(r);
    positions_[r] = f.position(sequence_, r / group_);
    widen_row(f.q + token(r) * f.q_token + head * f.q_head, dim_, q_ + r * width_);
    const float* dout = dout_ + r * width_;
    widen_row(call_->dout + token(r) * call_->dout_token + head * call_->dout_head, dim_, dout_ + r * width_);
    const uint16_t* out = f.out + row * dim_;
    delta_[r] = lane_dot(dim_, [&](int64_t i, int n) { return load_part(dout + i, n); },
                         [&](int64_t i, int n) { return load_part_bf16(out + i, n); });
    largest_[r] = f.largest[row];
    inverse_[r] = 1.0f / f.sum[row];
  }

  void load_tile(int64_t tile, int n) {
    const uint16_t* k[kTile] = {};
    const uint16_t* v[kTile] = {};
    call_->forward.point(sequence_, head_, tile, n, k, v);
    transpose_rows(k, n, 0, dim_, keys_across_);
    transpose_rows(v, n, 0, dim_, values_across_);
    for (int i = 0; i < n; ++i) widen_row(k[i], dim_, keys_ + i * width_);
    std::fill(dk_, dk_ + kTile * width_, 0.0f);
    std::fill(dv_, dv_ + kTile * width_, 0.0f);
  }

  void store_tile(int64_t tile, int n) {
    const AttentionCall& f = call_->forward;
    for (int i = 0; i < n; ++i) {
      int64_t at = ((f.k_offsets[sequence_] + tile + i) * f.kv_heads + head_) * dim_;
      finish(dk_ + i * width_, call_->scale, call_->dk + at);
      finish(dv_ + i * width_, 1.0f, call_->dv + at);
    }
  }

  void finish(float* acc, float factor, uint16_t* to) {
    for (int d = 0; d < width_; d += kLanes)
      ((F32x16::load(acc + d) + F32x16::zero()) * F32x16::all(factor)).store(acc + d);
    narrow_row(acc, dim_, to);
  }

  // Rows r .. r + n meet the loaded tile of `keys` keys.
  void block(int64_t r, int n, int64_t tile, int keys) {
    for (int i = 0; i < n; i += kBlockRows) scores(r + i, std::min(kBlockRows, n - i), tile, keys, i * kTile);
    int begins[kTile];  // the first of these rows that reaches a key
    for (int j = 0, i = 0; j < keys; ++j) {
      while (i < n && positions_[r + i] < tile + j) ++i;
      begins[j] = i;
    }
    for (int j = 0; j < keys && begins[j] < n; j += kBlockRows) {
      int some = std::min(kBlockRows, keys - j);
      chain_from_begins({p_ + j, 1, kTile}, Wide{dout_ + r * width_, width_}, dv_ + j * width_, some, begins + j, n);
      chain_from_begins({ds_ + j, 1, kTile}, Wide{q_ + r * width_, width_}, dk_ + j * width_, some, begins + j, n);
    }
  }

  // bf16(P) and bf16(dS) of a few rows into p_ and ds_ from `at` on, and their share of dQ.
  void scores(int64_t r, int n, int64_t tile, int keys, int at) {
    int counts[kBlockRows];
    for (int i = 0; i < n; ++i) counts[i] = static_cast<int>(std::min<int64_t>(keys, positions_[r + i] + 1 - tile));
    int vectors = padded(counts[n - 1]) / kLanes;
    float *p = p_ + at, *ds = ds_ + at;
    chain({q_ + r * width_, width_, 1}, Wide{keys_across_, kTile}, p, kTile, n, dim_, vectors, true);
    chain({dout_ + r * width_, width_, 1}, Wide{values_across_, kTile}, ds, kTile, n, dim_, vectors, true);
    F32x16 c = F32x16::all(call_->forward.c);
    for (int i = 0; i < n; ++i) {
      F32x16 largest = F32x16::all(largest_[r + i]), inverse = F32x16::all(inverse_[r + i]);
      F32x16 delta = F32x16::all(delta_[r + i]);
      for (int j = i * kTile; j < i * kTile + vectors * kLanes; j += kLanes) {
        F32x16 weight = exp2(F32x16::load(p + j) * c - largest) * inverse;
        through_bf16(weight * (F32x16::load(ds + j) - delta)).store(ds + j);
        through_bf16(weight).store(p + j);
      }
    }
    chain_to_ends({ds, kTile, 1}, Wide{keys_, width_}, dq_ + r * width_, width_, n, counts, width_ / kLanes, false);
  }

  // C[j] continues over the rows from begins[j] up to n; begins ascend.
  void chain_from_begins(Left a, Wide b, float* c, int rows, const int* begins, int n) {
    int common = std::min(begins[rows - 1], n), vectors = width_ / kLanes;
    for (int j = 0; j < rows; ++j)
      if (begins[j] < common)
        chain(a.from(j, begins[j]), b.from(begins[j], 0), c + j * width_, width_, 1, common - begins[j], vectors, false);
    chain(a.from(0, common), b.from(common, 0), c, width_, rows, n - common, vectors, false);
  }

  const AttentionGradients* call_ = nullptr;
  int64_t sequence_ = 0, head_ = 0, rows_ = 0;
  int group_ = 0, dim_ = 0, width_ = 0;
  std::vector<float> memory_;
  std::vector<int64_t> positions_;
  float *q_ = nullptr, *dout_ = nullptr, *dq_ = nullptr, *largest_ = nullptr, *inverse_ = nullptr, *delta_ = nullptr;
  float *keys_ = nullptr, *keys_across_ = nullptr, *values_across_ = nullptr, *dk_ = nullptr, *dv_ = nullptr;
  float *p_ = nullptr, *ds_ = nullptr;
};

void zero(uint16_t* rows, int64_t begin, int64_t end, int64_t width) {
  std::memset(rows + begin * width, 0, static_cast<size_t>((end - begin) * width) * sizeof(uint16_t));
}

}  // namespace

void attention_backward(const AttentionGradients& call) {
  const AttentionCall& f = call.forward;
  int64_t owners = f.sequences * f.kv_heads, work = 0, kv_width = f.kv_heads * f.head_dim;
  zero(call.dq, f.q_offsets[f.sequences], f.tokens, f.heads * f.head_dim);
  for (uint16_t* d : {call.dk, call.dv}) {
    zero(d, f.k_offsets[f.sequences], call.keys, kv_width);
    for (int64_t b = 0; b < f.sequences; ++b)
      if (!f.rows(b)) zero(d, f.k_offsets[b], f.k_offsets[b + 1], kv_width);
  }
  for (int64_t b = 0; b < f.sequences; ++b) work += f.rows(b) * f.keys(b) * f.heads * f.head_dim;
  std::atomic<int64_t> next{0};
  parallel_for(std::min<int64_t>({threads(), owners, work / kWorkPerThread + 1}), 1, [&](int64_t, int64_t) {
    static thread_local Owner owner;
    for (int64_t i = next++; i < owners; i = next++)
      if (f.rows(i / f.kv_heads)) owner.run(call, i / f.kv_heads, i % f.kv_heads);
  });
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
