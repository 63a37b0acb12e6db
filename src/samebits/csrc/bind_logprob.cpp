#include "bind.h"

namespace samebits {

void bind_logprob(nb::module_& m) {
  static Counter states("lse_states"), rows_logprob("logprob"), draws("sample");
  static Counter head("linear_logp"), gradients("linear_logp_backward");
  m.def("lse_states",
        [](Address logits, int64_t stride, int64_t rows, int64_t columns, Address temperatures, float temperature,
           Address out) {
          states.bump();
          SB_CALL(lse_states, at<float>(logits), stride, rows, columns, at<float>(temperatures), temperature,
                  at<int64_t>(out));
        }, Release());
  m.def("lse_finish", [](Address in, Address lse, int64_t rows) {
    SB_CALL(lse_finish, at<int64_t>(in), at<float>(lse), rows);
  }, Release());
  m.def("logp_finish", [](Address in, Address z, Address logp, int64_t rows, int64_t n) {
    SB_CALL(logp_finish, at<int64_t>(in), at<float>(z), at<float>(logp), rows, n);
  }, Release());
  m.def("logprob",
        [](Address logits, int64_t stride, int64_t rows, int64_t columns, Address targets, int64_t n,
           Address temperatures, float temperature, Address logp) {
          rows_logprob.bump();
          SB_CALL(logprob, at<float>(logits), stride, rows, columns, at<int64_t>(targets), n,
                  at<float>(temperatures), temperature, at<float>(logp));
        }, Release());
  m.def("sample",
        [](Address logits, int64_t stride, int64_t rows, int64_t columns, Address temperatures, float temperature,
           Address seeds, Address positions, Address tokens, Address logp) {
          draws.bump();
          SB_CALL(sample, at<float>(logits), stride, rows, columns, at<float>(temperatures), temperature,
                  at<int64_t>(seeds), at<int64_t>(positions), at<int64_t>(tokens), at<float>(logp));
        }, Release());
  m.def("head_states",
        [](Address hidden, Address weight, Address bias, Address targets, Address temperatures, float temperature,
           Address out, int64_t rows, int64_t columns, int64_t depth) {
          head.bump();
          SB_CALL(head_states, at<uint16_t>(hidden), at<uint16_t>(weight), at<float>(bias), at<int64_t>(targets),
                  at<float>(temperatures), temperature, at<int64_t>(out), rows, columns, depth);
        }, Release());
  m.def("head_gradients",
        [](Address upstream, Address hidden, Address weight, Address bias, Address targets, Address temperatures,
           float temperature, Address lse, Address dhidden, Address dw, Address dbias, int64_t rows, int64_t columns,
           int64_t depth) {
          gradients.bump();
          SB_CALL(head_gradients, at<float>(upstream), at<uint16_t>(hidden), at<uint16_t>(weight), at<float>(bias),
                  at<int64_t>(targets), at<float>(temperatures), temperature, at<float>(lse), at<float>(dhidden),
                  at<float>(dw), at<float>(dbias), rows, columns, depth);
        }, Release());
}

}  // namespace samebits
