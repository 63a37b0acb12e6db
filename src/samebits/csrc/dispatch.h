// One table of kernels per instruction set. Each op declares its kernels in <op>.inc, which is included
// once per namespace; SB_CALL picks the namespace that is active at run time.
#pragma once

#include <cstdint>

#include "attention_call.h"

namespace samebits {

enum class Isa { scalar, avx2, avx512 };
Isa active_isa();
void force_isa(const char* name);  // "scalar", "avx2", "avx512" or "best"; throws std::invalid_argument
const char* isa_name(Isa isa);

}  // namespace samebits


namespace samebits {
#if defined(SAMEBITS_ONLY_ISA)
namespace SAMEBITS_ONLY_ISA {
#include "kernels.inc"
}
#define SB_CALL(f, ...) ::samebits::SAMEBITS_ONLY_ISA::f(__VA_ARGS__)
#else
namespace scalar {
#include "kernels.inc"
}
#if defined(__x86_64__)
namespace avx2 {
#include "kernels.inc"
}
namespace avx512 {
#include "kernels.inc"
}
#define SB_CALL(f, ...)                                                                     \
  (::samebits::active_isa() == ::samebits::Isa::avx512 ? ::samebits::avx512::f(__VA_ARGS__) \
   : ::samebits::active_isa() == ::samebits::Isa::avx2 ? ::samebits::avx2::f(__VA_ARGS__)   \
                                                       : ::samebits::scalar::f(__VA_ARGS__))
#else
#define SB_CALL(f, ...) ::samebits::scalar::f(__VA_ARGS__)
#endif
#endif
}  // namespace samebits
