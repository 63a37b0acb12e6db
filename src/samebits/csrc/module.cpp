// The Python module samebits._cpu.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "pool.h"

namespace samebits {

void bind_linear(nb::module_&);
void bind_arithmetic(nb::module_&);
void bind_attention(nb::module_&);
void bind_rms_norm(nb::module_&);
void bind_logprob(nb::module_&);
void bind_sample_support(nb::module_&);
void bind_elementwise(nb::module_&);
void bind_words(nb::module_&);

}  // namespace samebits

NB_MODULE(_cpu, m) {
  using namespace samebits;
  m.def("counters", [] {
    std::map<std::string, uint64_t> calls;
    for (const auto& [name, counter] : Counter::registry()) calls[name] = counter->calls();
    return calls;
  });
  m.def("instruction_set", [] { return std::string(isa_name(active_isa())); });
  m.def("force_instruction_set", [](const std::string& name) { force_isa(name.c_str()); });
  m.def("set_threads", &set_threads);
  m.def("threads", &threads);
  m.def("primitive", [](int which, Address x, Address y, int64_t n) {
    SB_CALL(primitive, which, at<float>(x), at<float>(y), n);
  }, Release());
  bind_linear(m);
  bind_arithmetic(m);
  bind_attention(m);
  bind_rms_norm(m);
  bind_logprob(m);
  bind_sample_support(m);
  bind_elementwise(m);
  bind_words(m);
}
