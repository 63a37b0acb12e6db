#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "attention_call.h"
#include "attention_tiles.h"
#include "pool.h"

namespace samebits {
namespace SAMEBITS_ISA {
#include "attention.inc"

namespace {

constexpr int kRows = 66;  // query rows (position, head of the group) that share a tile in fp32
constexpr int kSlice = 32;
constexpr int64_t kWorkPerThread = 1 << 18;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Consecutive query positions of one kv head: row r is position first + r / group, head r % group of the group.
struct Item {
  int32_t sequence, head, first, count;
};

// Softmax states of the rows of an item.
struct State {
  float* largest;
  float* sum;
  float* acc;  // [rows][width]

  static int64_t floats(int64_t rows, int64_t width) { return rows * (width + 2); }
  static State in(float* memory, int64_t rows, int64_t width) {
    return {memory + rows * width, memory + rows * (width + 1), memory};
  }
};

class Worker {
 public:
  void begin(const AttentionCall& call, const Item& item) {
    call_ = &call;
    item_ = item;
    group_ = static_cast<int>(call.group());
    dim_ = static_cast<int>(call.head_dim);
    width_ = padded(dim_);
    rows_ = item.count * group_;
    reserve();
    for (int i = 0; i < item.count; ++i) {
      int64_t position = call.position(item.sequence, item.first + i);
      const uint16_t* row = call.q + (call.q_offsets[item.sequence] + item.first + i) * call.q_token;
      for (int g = 0; g < group_; ++g) {
        positions_[i * group_ + g] = position;
        widen_row(row + (item.head * group_ + g) * call.q_head, dim_, q_ + (i * group_ + g) * width_);
      }
    }
  }

  int64_t last() const { return positions_[rows_ - 1]; }
  State total() { return State::in(total_, rows_, width_); }
  State part() { return State::in(part_, rows_, width_); }

  // The state of the chunk that starts at key `begin`, for the rows that reach it.
  void chunk(int64_t begin, State state) {
    std::fill(state.largest, state.largest + rows_, -kInfinity);
    std::fill(state.sum, state.sum + rows_, 0.0f);
    int64_t end = std::min<int64_t>(begin + kChunk, last() + 1);
    for (int64_t tile = begin; tile < end; tile += kTile) {
      load(tile, static_cast<int>(std::min<int64_t>(kTile, end - tile)));
      // first the keys, then the values: each stays in the first-level cache for all rows
      for (int r = first_row(tile); r < rows_; r += kBlockRows) score(r, std::min(kBlockRows, rows_ - r), tile);
      for (int r = first_row(tile); r < rows_; r += kBlockRows)
        take(r, std::min(kBlockRows, rows_ - r), tile, tile == begin, state);
    }
  }

  // The states of an earlier run of chunks and of the chunk that follows, for the rows that reach the latter.
  void merge(int64_t begin, State total, State later) {
    for (int r = first_row(begin); r < rows_; ++r) {
      float m = later.largest[r] > total.largest[r] ? later.largest[r] : total.largest[r];
      float scales[kLanes] = {total.largest[r] - m, later.largest[r] - m};
      exp2(F32x16::load(scales)).store(scales);
      F32x16 a = F32x16::all(scales[0]), b = F32x16::all(scales[1]);
      total.largest[r] = m;
      total.sum[r] = __builtin_fmaf(total.sum[r], scales[0], later.sum[r] * scales[1]);
      float* acc = total.acc + r * width_;
      const float* add = later.acc + r * width_;
      for (int d = 0; d < width_; d += kLanes)
        fma(F32x16::load(acc + d), a, F32x16::load(add + d) * b).store(acc + d);
    }
  }

  void finish(State total) {
    for (int r = 0; r < rows_; ++r) {
      int64_t token = call_->q_offsets[item_.sequence] + item_.first + r / group_;
      int64_t row = token * call_->heads + item_.head * group_ + r % group_;
      F32x16 sum = F32x16::all(total.sum[r]);
      float* acc = total.acc + r * width_;
      for (int d = 0; d < width_; d += kLanes) (F32x16::load(acc + d) / sum).store(acc + d);
      narrow_row(acc, dim_, call_->out + row * dim_);
      if (!call_->largest) continue;
      call_->largest[row] = total.largest[r];
      call_->sum[row] = total.sum[r];
    }
  }

 private:
  // Each part starts on a cache line: the products read whole lines.
  void reserve() {
    int64_t rows = rows_ + kBlockRows, state = State::floats(rows, width_), tile = kTile * width_;
    float** parts[] = {&q_, &total_, &part_, &keys_, &values_, &scores_};
    int64_t sizes[] = {rows * width_, state, state, tile, tile, rows * kTile}, all = kLanes;
    for (int64_t& size : sizes) all += size = (size + kLanes - 1) / kLanes * kLanes;
    if (static_cast<int64_t>(memory_.size()) < all) memory_.resize(all);
    positions_.resize(rows_);
    float* next = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) / sizeof(float);
    for (int i = 0; i < 6; ++i) *parts[i] = next, next += sizes[i];
  }

  int first_row(int64_t key) const {
    return static_cast<int>(std::lower_bound(positions_.begin(), positions_.end(), key) - positions_.begin());
  }

  // How many keys of a tile a row sees.
  int count(int row, int64_t tile) const {
    return static_cast<int>(std::min<int64_t>(kTile, positions_[row] + 1 - tile));
  }
  int vectors(int row, int64_t tile) const { return padded(count(row, tile)) / kLanes; }

  // Few rows read a tile once: then it is converted on the way, else it is kept in fp32 for all of them.
  bool few() const { return rows_ <= kBlockRows && dim_ % kLanes == 0; }

  void load(int64_t tile, int n) {
    call_->point(item_.sequence, item_.head, tile, n, key_rows_, value_rows_);
    loaded_ = n;
    if (few()) return;
    transpose_rows(key_rows_, n, 0, dim_, keys_);
    for (int i = 0; i < n; ++i) widen_row(value_rows_[i], dim_, values_ + i * width_);
  }

  // The scores of rows r .. r + n with the loaded tile.
  void score(int r, int n, int64_t tile) {
    const float* q = q_ + r * width_;
    float* p = scores_ + r * kTile;
    int wide = vectors(r + n - 1, tile);
    if (!few()) return chain({q, width_, 1}, Wide{keys_, kTile}, p, kTile, n, dim_, wide, true);
    for (int d = 0; d < dim_; d += kSlice) {  // a slice of the keys stays in the first-level cache
      int part = std::min(kSlice, dim_ - d);
      transpose_rows(key_rows_, loaded_, d, part, keys_);
      chain({q + d, width_, 1}, Wide{keys_, kTile}, p, kTile, n, part, wide, d == 0);
    }
  }

  // Rows r .. r + n take the loaded tile by their scores.
  void take(int r, int n, int64_t tile, bool first, State state) {
    float* p = scores_ + r * kTile;
    float* acc = state.acc + r * width_;
    int counts[kBlockRows];
    for (int i = 0; i < n; ++i) counts[i] = count(r + i, tile);
    softmax(p, n, counts, vectors(r + n - 1, tile), state.largest + r, state.sum + r, first ? nullptr : acc);
    if (few())
      chain_to_ends({p, kTile, 1}, Narrow{value_rows_, 0}, acc, width_, n, counts, width_ / kLanes, first);
    else
      chain_to_ends({p, kTile, 1}, Wide{values_, width_}, acc, width_, n, counts, width_ / kLanes, first);
    for (int i = 0; i < n && counts[i] < kTile; ++i)  // the masked keys of the tile
      for (int d = 0; d < width_; d += kLanes) (F32x16::load(acc + i * width_ + d) + F32x16::zero()).store(acc + i * width_ + d);
  }

  // Scores become bf16(p); largest, sum and (if given) acc move on.
  void softmax(float* p, int n, const int* counts, int vectors, float* largest, float* sum, float* acc) {
    F32x16 c = F32x16::all(call_->c);
    float scales[kLanes] = {}, tops[kBlockRows];
    for (int i = 0; i < n; ++i) {
      float* row = p + i * kTile;
      for (int v = 0; v < vectors; ++v) (F32x16::load(row + v * kLanes) * c).store(row + v * kLanes);
      for (int j = counts[i]; j < vectors * kLanes; ++j) row[j] = -kInfinity;
      F32x16 top = F32x16::all(-kInfinity);
      for (int v = 0; v < vectors; ++v) top = max(F32x16::load(row + v * kLanes), top);
      float t = largest_lane(top);
      tops[i] = t > largest[i] ? t : largest[i];
      scales[i] = largest[i] - tops[i];
      largest[i] = tops[i];
    }
    exp2(F32x16::load(scales)).store(scales);
    for (int i = 0; i < n; ++i) {
      float* row = p + i * kTile;
      F32x16 m = F32x16::all(tops[i]), parts[kTile / kLanes];
      for (int v = 0; v < kTile / kLanes; ++v) {
        parts[v] = v < vectors ? exp2(F32x16::load(row + v * kLanes) - m) : F32x16::zero();
        through_bf16(parts[v]).store(row + v * kLanes);
      }
      sum[i] = __builtin_fmaf(sum[i], scales[i], fold((parts[0] + parts[2]) + (parts[1] + parts[3])));
      if (!acc || scales[i] == 1.0f) continue;
      F32x16 a = F32x16::all(scales[i]);
      for (int d = 0; d < width_; d += kLanes) (F32x16::load(acc + i * width_ + d) * a).store(acc + i * width_ + d);
    }
  }

  const AttentionCall* call_ = nullptr;
  Item item_{};
  int group_ = 0, dim_ = 0, width_ = 0, rows_ = 0;
  int loaded_ = 0;
  const uint16_t* key_rows_[kTile] = {};
  const uint16_t* value_rows_[kTile] = {};
  std::vector<float> memory_;
  std::vector<int64_t> positions_;
  float *q_ = nullptr, *total_ = nullptr, *part_ = nullptr, *keys_ = nullptr, *values_ = nullptr, *scores_ = nullptr;
};

void run(Worker& worker, const AttentionCall& call, const Item& item) {
  worker.begin(call, item);
  for (int64_t begin = 0; begin <= worker.last(); begin += kChunk) {
    worker.chunk(begin, begin ? worker.part() : worker.total());
    if (begin) worker.merge(begin, worker.total(), worker.part());
  }
  worker.finish(worker.total());
}

// The items, the longest first, and the work in multiply-adds.
int64_t list_items(const AttentionCall& call, std::vector<Item>& items) {
  items.clear();
  int64_t work = 0;
  int32_t block = static_cast<int32_t>(std::max<int64_t>(1, kRows / call.group()));
  for (int32_t b = 0; b < call.sequences; ++b) {
    int32_t rows = static_cast<int32_t>(call.rows(b));
    for (int32_t first = 0; first < rows; first += block) {
      int32_t count = std::min(block, rows - first);
      work += call.heads * count * (call.position(b, first + count - 1) + 1) * call.head_dim * 2;
      for (int32_t h = 0; h < call.kv_heads; ++h) items.push_back({b, h, first, count});
    }
  }
  std::reverse(items.begin(), items.end());
  return work;
}

}  // namespace

void attention_forward(const AttentionCall& call) {
  static thread_local std::vector<Item> items;
  int64_t work = list_items(call, items);
  const std::vector<Item>& list = items;
  int64_t parts = std::min<int64_t>({threads(), static_cast<int64_t>(list.size()), work / kWorkPerThread + 1});
  std::atomic<size_t> next{0};
  parallel_for(parts, 1, [&](int64_t, int64_t) {
    static thread_local Worker worker;
    for (size_t i = next++; i < list.size(); i = next++) run(worker, call, list[i]);
  });
  int64_t row = call.heads * call.head_dim, used = call.q_offsets[call.sequences];
  std::memset(call.out + used * row, 0, (call.tokens - used) * row * sizeof(uint16_t));
  if (!call.largest) return;
  std::memset(call.largest + used * call.heads, 0, (call.tokens - used) * call.heads * sizeof(float));
  std::memset(call.sum + used * call.heads, 0, (call.tokens - used) * call.heads * sizeof(float));
}

}  // namespace SAMEBITS_ISA
}  // namespace samebits
