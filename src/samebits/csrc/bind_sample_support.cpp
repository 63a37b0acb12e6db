#include "bind.h"

namespace samebits {

void bind_sample_support(nb::module_& m) {
  static Counter cuts("sample_support"), draws("sample_kept"), rows_logprob("kept_logprob");
  static Counter head("kept_linear_logp"), gradients("kept_linear_logp_backward");
  m.def("support_cuts",
        [](Address logits, int64_t stride, int64_t rows, int64_t columns, Address temperatures, float temperature,
           Address top_k, Address top_p, Address min_p, Address counts, Address out) {
          cuts.bump();
          SB_CALL(support_cuts, at<float>(logits), stride, rows, columns, at<float>(temperatures), temperature,
                  at<int64_t>(top_k), at<float>(top_p), at<float>(min_p), at<int64_t>(counts), at<int64_t>(out));
        }, Release());
  m.def("support_ids",
        [](Address logits, int64_t stride, int64_t rows, int64_t columns, Address temperatures, float temperature,
           Address offsets, Address cut, Address ids) {
          SB_CALL(support_ids, at<float>(logits), stride, rows, columns, at<float>(temperatures), temperature,
                  at<int64_t>(offsets), at<int64_t>(cut), at<int64_t>(ids));
        }, Release());
  m.def("sample_kept",
        [](Address logits, int64_t stride, int64_t rows, Address temperatures, float temperature, Address seeds,
           Address positions, Address offsets, Address ids, Address tokens, Address logp) {
          draws.bump();
          SB_CALL(sample_kept, at<float>(logits), stride, rows, at<float>(temperatures), temperature,
                  at<int64_t>(seeds), at<int64_t>(positions), at<int64_t>(offsets), at<int64_t>(ids),
                  at<int64_t>(tokens), at<float>(logp));
        }, Release());
  m.def("kept_logprob",
        [](Address logits, int64_t stride, int64_t rows, Address targets, int64_t n, Address temperatures,
           float temperature, Address offsets, Address ids, Address logp) {
          rows_logprob.bump();
          SB_CALL(kept_logprob, at<float>(logits), stride, rows, at<int64_t>(targets), n, at<float>(temperatures),
                  temperature, at<int64_t>(offsets), at<int64_t>(ids), at<float>(logp));
        }, Release());
  m.def("kept_states",
        [](Address hidden, Address weight, Address bias, Address targets, Address temperatures, float temperature,
           Address offsets, Address ids, Address out, int64_t rows, int64_t depth) {
          head.bump();
          SB_CALL(kept_states, at<uint16_t>(hidden), at<uint16_t>(weight), at<float>(bias), at<int64_t>(targets),
                  at<float>(temperatures), temperature, at<int64_t>(offsets), at<int64_t>(ids), at<int64_t>(out),
                  rows, depth);
        }, Release());
  m.def("kept_gradients",
        [](Address upstream, Address hidden, Address weight, Address bias, Address targets, Address temperatures,
           float temperature, Address lse, Address offsets, Address ids, Address dhidden, Address dw, Address dbias,
           int64_t rows, int64_t depth) {
          gradients.bump();
          SB_CALL(kept_gradients, at<float>(upstream), at<uint16_t>(hidden), at<uint16_t>(weight), at<float>(bias),
                  at<int64_t>(targets), at<float>(temperatures), temperature, at<float>(lse), at<int64_t>(offsets),
                  at<int64_t>(ids), at<float>(dhidden), at<float>(dw), at<float>(dbias), rows, depth);
        }, Release());
}

}  // namespace samebits
