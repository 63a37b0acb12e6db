#include "bind.h"

namespace samebits {

void bind_rms_norm(nb::module_& m) {
  static Counter forward("rms_norm"), backward("rms_norm_backward");
  m.def("rms_norm_forward",
        [](Address x, int64_t x_stride, Address residual, int64_t residual_stride, Address weight, float eps,
           Address y, Address sum, Address scale, int64_t rows, int64_t width) {
          forward.bump();
          SB_CALL(rms_norm_forward, at<uint16_t>(x), x_stride, at<uint16_t>(residual), residual_stride,
                  at<uint16_t>(weight), eps, at<uint16_t>(y), at<uint16_t>(sum), at<float>(scale), rows, width);
        }, Release());
  m.def("rms_norm_backward",
        [](Address dy, int64_t dy_stride, Address x, int64_t x_stride, Address weight, Address scale, Address dsum,
           int64_t dsum_stride, Address dx, Address dw, int64_t rows, int64_t width) {
          backward.bump();
          SB_CALL(rms_norm_backward, at<uint16_t>(dy), dy_stride, at<uint16_t>(x), x_stride, at<uint16_t>(weight),
                  at<float>(scale), at<uint16_t>(dsum), dsum_stride, at<uint16_t>(dx), at<float>(dw), rows, width);
        }, Release());
}

}  // namespace samebits
