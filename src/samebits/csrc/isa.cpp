#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace samebits {
namespace {

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::scalar;
}

Isa active = best_isa();

}  // namespace

Isa active_isa() { return active; }

const char* isa_name(Isa isa) {
  return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "scalar";
}

void force_isa(const char* name) {
  std::string wanted = name;
  Isa best = best_isa();
  if (wanted == "best") { active = best; return; }
  for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512})
    if (wanted == isa_name(isa)) {
      if (isa > best)
        throw std::invalid_argument("instruction set '" + wanted + "' was asked for, but this processor offers '" +
                                    isa_name(best) + "' at most");
      active = isa;
      return;
    }
  throw std::invalid_argument("unknown instruction set '" + wanted + "': use scalar, avx2, avx512 or best");
}

}  // namespace samebits
