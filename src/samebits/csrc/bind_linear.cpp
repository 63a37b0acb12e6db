#include "bind.h"

namespace samebits {

void bind_linear(nb::module_& m) {
  static Counter forward("linear"), dgrad("linear_dgrad"), wgrad("linear_wgrad"), bias_grad("linear_bias_grad");
  m.def("linear_forward",
        [](Address x, int64_t x_stride, Address w, int64_t w_stride, Address bias, Address y, bool wide, int64_t rows,
           int64_t n, int64_t k, int64_t segments) {
          forward.bump();
          if (wide)
            SB_CALL(linear_forward_f32, at<uint16_t>(x), x_stride, at<uint16_t>(w), w_stride, at<uint16_t>(bias),
                    at<float>(y), rows, n, k, segments);
          else
            SB_CALL(linear_forward, at<uint16_t>(x), x_stride, at<uint16_t>(w), w_stride, at<uint16_t>(bias),
                    at<uint16_t>(y), rows, n, k, segments);
        }, Release());
  m.def("linear_dgrad",
        [](Address dy, int64_t dy_stride, Address w, int64_t w_stride, Address dx, bool wide, int64_t rows, int64_t n,
           int64_t k) {
          dgrad.bump();
          if (wide)
            SB_CALL(linear_dgrad_f32, at<uint16_t>(dy), dy_stride, at<uint16_t>(w), w_stride, at<float>(dx), rows, n,
                    k);
          else
            SB_CALL(linear_dgrad, at<uint16_t>(dy), dy_stride, at<uint16_t>(w), w_stride, at<uint16_t>(dx), rows, n,
                    k);
        }, Release());
  m.def("linear_wgrad",
        [](Address dy, int64_t dy_stride, Address x, int64_t x_stride, Address dw, int64_t rows, int64_t n,
           int64_t k) {
          wgrad.bump();
          SB_CALL(linear_wgrad, at<uint16_t>(dy), dy_stride, at<uint16_t>(x), x_stride, at<float>(dw), rows, n, k);
        }, Release());
  m.def("linear_bias_grad", [](Address dy, int64_t dy_stride, Address db, int64_t rows, int64_t n) {
    bias_grad.bump();
    SB_CALL(linear_bias_grad, at<uint16_t>(dy), dy_stride, at<float>(db), rows, n);
  }, Release());
}

}  // namespace samebits
