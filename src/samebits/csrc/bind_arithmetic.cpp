#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind.h"

namespace samebits {

void bind_arithmetic(nb::module_& m) {
  static Counter dot("arithmetic_dot");
  m.def("arithmetic_dot",
        [](int arithmetic, Address a, int64_t a_stride, Address b, int64_t b_stride, Address out, int64_t rows,
           int64_t columns, int64_t depth) {
          dot.bump();
          SB_CALL(arithmetic_dot, arithmetic, at<uint16_t>(a), a_stride, at<uint16_t>(b), b_stride, at<float>(out),
                  rows, columns, depth);
        }, Release());
  m.def("sweep", [](int which, int64_t first, int64_t step) {
    uint64_t digest, decreases;
    uint32_t worst;
    double error, largest_decrease;
    SB_CALL(sweep, which, first, step, &digest, &error, &worst, &decreases, &largest_decrease);
    return std::make_tuple(digest, error, worst, decreases, largest_decrease);
  }, Release());
}

}  // namespace samebits
