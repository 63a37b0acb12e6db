#include <cstring>
#include <stdexcept>
#include <string>

#include "attention_call.h"
#include "bind.h"

namespace samebits {
namespace {

using std::to_string;

void check_offsets(const char* what, const int32_t* offsets, int64_t n, int64_t end) {
  bool ascend = offsets[0] == 0 && offsets[n] <= end;
  for (int64_t i = 0; i < n; ++i) ascend = ascend && offsets[i] <= offsets[i + 1];
  if (!ascend)
    throw std::invalid_argument(std::string(what) + " must start at 0, ascend and end by " + to_string(end) +
                                ", got " + to_string(offsets[0]) + " to " + to_string(offsets[n]));
}

void check_packed(const AttentionCall& call, int64_t keys) {
  check_offsets("attention: cu_seqlens_q", call.q_offsets, call.sequences, call.tokens);
  check_offsets("attention: cu_seqlens", call.k_offsets, call.sequences, keys);
  for (int64_t b = 0; call.positions && b < call.sequences; ++b) {
    const int32_t *p = call.positions + call.q_offsets[b], *end = call.positions + call.q_offsets[b + 1];
    if (p == end) continue;
    bool good = p[0] >= 0 && end[-1] < call.keys(b);
    for (const int32_t* i = p + 1; i < end; ++i) good = good && i[-1] <= i[0];
    if (!good)
      throw std::invalid_argument("attention: q_positions of sequence " + to_string(b) +
                                  " must be non-descending and in [0, " + to_string(call.keys(b)) + "), got " +
                                  to_string(p[0]) + " to " + to_string(end[-1]));
  }
}

void check_paged(const AttentionCall& call, int64_t blocks, int64_t table_width) {
  check_offsets("paged_attention: query_start_loc", call.q_offsets, call.sequences, call.tokens);
  for (int64_t b = 0; b < call.sequences; ++b) {
    int64_t length = call.lengths[b], pages = (length + call.page_size - 1) / call.page_size;
    if (length < call.rows(b) || pages > table_width)
      throw std::invalid_argument("paged_attention: request " + to_string(b) + " has " + to_string(length) +
                                  " tokens, " + to_string(call.rows(b)) + " query rows and room for " +
                                  to_string(table_width) + " pages of " + to_string(call.page_size));
    const int32_t* table = call.block_table + b * call.block_table_stride;
    for (int64_t i = 0; i < pages; ++i)
      if (table[i] < 0 || table[i] >= blocks)
        throw std::invalid_argument("paged_attention: request " + to_string(b) + " uses a page outside [0, " +
                                    to_string(blocks) + ")");
  }
}

void write_kv(const uint16_t* key, int64_t key_token, int64_t key_head, const uint16_t* value, int64_t value_token,
              int64_t value_head, uint16_t* cache, int64_t page, int64_t head, int64_t slot_stride, int64_t blocks,
              int64_t page_size, const int64_t* slots, int64_t tokens, int64_t heads, int64_t dim) {
  for (int64_t i = 0; i < tokens; ++i)
    if (slots[i] >= blocks * page_size)
      throw std::invalid_argument("write_kv: slot " + to_string(slots[i]) + " is outside a cache of " +
                                  to_string(blocks * page_size) + " slots");
  size_t bytes = static_cast<size_t>(dim) * sizeof(uint16_t);
  for (int64_t i = 0; i < tokens; ++i) {
    if (slots[i] < 0) continue;
    uint16_t* to = cache + slots[i] / page_size * page + slots[i] % page_size * slot_stride;
    for (int64_t h = 0; h < heads; ++h, to += head) {
      std::memcpy(to, key + i * key_token + h * key_head, bytes);
      std::memcpy(to + dim, value + i * value_token + h * value_head, bytes);
    }
  }
}

}  // namespace

void bind_attention(nb::module_& m) {
  static Counter packed("attention"), backward("attention_backward"), paged("paged_attention"), written("write_kv");
  m.def("attention_packed",
        [](Address q, int64_t q_token, int64_t q_head, Address k, int64_t k_token, int64_t k_head, Address v,
           int64_t v_token, int64_t v_head, Address q_offsets, Address k_offsets, Address positions,
           int64_t sequences, int64_t tokens, int64_t keys, int64_t heads, int64_t kv_heads, int64_t head_dim, float c,
           Address out, Address largest, Address sum) {
          AttentionCall call{at<uint16_t>(q), q_token, q_head, at<uint16_t>(k), at<uint16_t>(v), k_token, k_head,
                             v_token, v_head, 0, 0, 0, nullptr, at<int32_t>(q_offsets), at<int32_t>(k_offsets), nullptr,
                             at<int32_t>(positions), sequences, tokens, heads, kv_heads, head_dim, c,
                             at<uint16_t>(out), at<float>(largest), at<float>(sum)};
          check_packed(call, keys);
          packed.bump();
          SB_CALL(attention_forward, call);
        }, Release());
  m.def("attention_backward",
        [](Address q, int64_t q_token, int64_t q_head, Address k, int64_t k_token, int64_t k_head, Address v,
           int64_t v_token, int64_t v_head, Address dout, int64_t dout_token, int64_t dout_head, Address q_offsets,
           Address k_offsets, Address positions, int64_t sequences, int64_t tokens, int64_t keys, int64_t heads,
           int64_t kv_heads, int64_t head_dim, float c, float scale, Address out, Address largest, Address sum,
           Address dq, Address dk, Address dv) {
          AttentionCall call{at<uint16_t>(q), q_token, q_head, at<uint16_t>(k), at<uint16_t>(v), k_token, k_head,
                             v_token, v_head, 0, 0, 0, nullptr, at<int32_t>(q_offsets), at<int32_t>(k_offsets), nullptr,
                             at<int32_t>(positions), sequences, tokens, heads, kv_heads, head_dim, c,
                             at<uint16_t>(out), at<float>(largest), at<float>(sum)};
          AttentionGradients gradients{call, at<uint16_t>(dout), dout_token, dout_head, scale, keys,
                                       at<uint16_t>(dq), at<uint16_t>(dk), at<uint16_t>(dv)};
          check_packed(call, keys);
          backward.bump();
          SB_CALL(attention_backward, gradients);
        }, Release());
  m.def("attention_paged",
        [](Address q, int64_t q_token, int64_t q_head, Address cache, int64_t blocks, int64_t page_size,
           int64_t page_stride, int64_t head_stride, int64_t slot_stride, Address table, int64_t table_width,
           int64_t table_stride, Address lengths, Address q_offsets, int64_t sequences, int64_t tokens, int64_t heads,
           int64_t kv_heads, int64_t head_dim, float c, Address out) {
          const uint16_t* k = at<uint16_t>(cache);
          AttentionCall call{at<uint16_t>(q), q_token, q_head, k, k + head_dim, slot_stride, head_stride, slot_stride,
                             head_stride, page_size, page_stride, table_stride, at<int32_t>(table),
                             at<int32_t>(q_offsets), nullptr, at<int32_t>(lengths), nullptr, sequences, tokens, heads,
                             kv_heads, head_dim, c, at<uint16_t>(out), nullptr, nullptr};
          check_paged(call, blocks, table_width);
          paged.bump();
          SB_CALL(attention_forward, call);
        }, Release());
  m.def("write_kv",
        [](Address key, int64_t key_token, int64_t key_head, Address value, int64_t value_token, int64_t value_head,
           Address cache, int64_t page, int64_t head, int64_t slot, int64_t blocks, int64_t page_size, Address slots,
           int64_t tokens, int64_t heads, int64_t dim) {
          written.bump();
          write_kv(at<uint16_t>(key), key_token, key_head, at<uint16_t>(value), value_token, value_head,
                   at<uint16_t>(cache), page, head, slot, blocks, page_size, at<int64_t>(slots), tokens, heads, dim);
        }, Release());
}

}  // namespace samebits
