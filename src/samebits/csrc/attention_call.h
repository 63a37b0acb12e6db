// What a call of attention works on. Strides count elements; head_dim is the inner axis, of stride 1.
#pragma once

#include <cstdint>

namespace samebits {

struct AttentionCall {
  const uint16_t* q;
  int64_t q_token, q_head;
  const uint16_t* k;
  const uint16_t* v;
  int64_t k_token, k_head, v_token, v_head;
  // Paged keys: key j of sequence b is row j % page_size of page block_table[b][j / page_size]. page_size 0: packed.
  int64_t page_size, page_stride, block_table_stride;
  const int32_t* block_table;
  const int32_t* q_offsets;  // [sequences + 1] query rows
  const int32_t* k_offsets;  // packed: [sequences + 1] keys
  const int32_t* lengths;    // paged: [sequences] keys
  const int32_t* positions;  // [tokens], or null: the rows are the last ones of their sequence
  int64_t sequences, tokens, heads, kv_heads, head_dim;
  float c;          // fp32(scale * log2 e)
  uint16_t* out;    // [tokens, heads, head_dim]
  float* largest;   // [tokens, heads] m and l of the contract, or null
  float* sum;

  int64_t group() const { return heads / kv_heads; }
  int64_t rows(int64_t b) const { return q_offsets[b + 1] - q_offsets[b]; }
  int64_t keys(int64_t b) const { return page_size ? lengths[b] : k_offsets[b + 1] - k_offsets[b]; }
  int64_t position(int64_t b, int64_t row) const {
    return positions ? positions[q_offsets[b] + row] : keys(b) - rows(b) + row;
  }
  // Pointers to the keys and values j, j + 1, ... of one kv head.
  void point(int64_t b, int64_t head, int64_t j, int n, const uint16_t** kp, const uint16_t** vp) const {
    const int32_t* table = page_size ? block_table + b * block_table_stride + j / page_size : nullptr;
    int64_t row = page_size ? j % page_size : k_offsets[b] + j;
    int64_t page = table ? *table * page_stride : 0;
    for (int i = 0; i < n; ++i, ++row) {
      if (table && row == page_size) {
        row = 0;
        page = *++table * page_stride;
      }
      kp[i] = k + page + row * k_token + head * k_head;
      vp[i] = v + page + row * v_token + head * v_head;
    }
  }
};

// Gradients: the forward call with its m and l, and dout; dk and dv are [keys, kv_heads, head_dim].
struct AttentionGradients {
  AttentionCall forward;
  const uint16_t* dout;
  int64_t dout_token, dout_head;
  float scale;
  int64_t keys;
  uint16_t* dq;
  uint16_t* dk;
  uint16_t* dv;
};

}  // namespace samebits
