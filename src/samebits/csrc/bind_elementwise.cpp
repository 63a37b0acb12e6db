#include <stdexcept>

#include "bind.h"

namespace samebits {

void bind_elementwise(nb::module_& m) {
  static Counter rotary_calls("rotary"), swiglu("swiglu"), swiglu_back("swiglu_backward");
  static Counter embed("embedding"), embed_back("embedding_backward");
  m.def("rotary",
        [](Address x, int64_t token_stride, int64_t head_stride, Address positions, Address cos, Address sin,
           Address y, int64_t tokens, int64_t heads, int64_t width, int64_t table_rows, bool inverse) {
          rotary_calls.bump();
          bool inside = SB_CALL(rotary, at<uint16_t>(x), token_stride, head_stride, at<int64_t>(positions),
                                at<float>(cos), at<float>(sin), at<uint16_t>(y), tokens, heads, width, table_rows,
                                inverse);
          if (!inside) throw std::out_of_range("rotary: a position is outside the table; build it for more positions");
        }, Release());
  m.def("swiglu_forward",
        [](Address gate_up, int64_t stride, Address y, int64_t rows, int64_t width) {
          swiglu.bump();
          SB_CALL(swiglu_forward, at<uint16_t>(gate_up), stride, at<uint16_t>(y), rows, width);
        }, Release());
  m.def("swiglu_backward",
        [](Address dy, int64_t dy_stride, Address gate_up, int64_t stride, Address grad, int64_t rows, int64_t width) {
          swiglu_back.bump();
          SB_CALL(swiglu_backward, at<uint16_t>(dy), dy_stride, at<uint16_t>(gate_up), stride, at<uint16_t>(grad),
                  rows, width);
        }, Release());
  m.def("embedding_forward",
        [](Address ids, Address weight, Address y, int64_t tokens, int64_t rows, int64_t width, int64_t start) {
          embed.bump();
          SB_CALL(embedding_forward, at<int64_t>(ids), at<uint16_t>(weight), at<uint16_t>(y), tokens, rows, width,
                  start);
        }, Release());
  m.def("embedding_backward",
        [](Address ids, Address dy, int64_t dy_stride, Address dw, int64_t tokens, int64_t rows, int64_t width,
           int64_t start) {
          embed_back.bump();
          SB_CALL(embedding_backward, at<int64_t>(ids), at<uint16_t>(dy), dy_stride, at<float>(dw), tokens, rows,
                  width, start);
        }, Release());
}

}  // namespace samebits
