"""Faults that the conformance cases must notice: each makes one kernel wrong in one believable way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Replacements in one file (of csrc/, or of the package for Triton kernels), or one compiler flag.

    Each text occurs once in the file. `op` names the cases that must notice, under `arithmetic`; `isa` is set where
    the code exists for one instruction set only; `quick` ones are tried by every test run, all by `make sabotage`.
    """

    name: str
    op: str
    file: str = ""
    edits: tuple[tuple[str, str], ...] = ()
    flag: str = ""
    isa: str = ""
    quick: bool = False
    arithmetic: str = "fma32"

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


def with_fault(text: str, fault: Fault) -> str:
    """A source text made wrong. ValueError when it does not hold what the fault replaces exactly once."""
    for old, new in fault.edits:
        if text.count(old) != 1:
            raise ValueError(
                f"{fault}: {fault.file} holds {old!r} {text.count(old)} times, wanted once; "
                "bring the fault up to date with the kernel"
            )
        text = text.replace(old, new)
    return text


_CONTRACT = "-ffp-contract=fast"
_SUPPORT, _KEPT = "kernels/sample_support.cpp", "kernels/kept_head.cpp"
_GEMM, _LINEAR, _FEW = "kernels/gemm.cpp", "kernels/linear.cpp", "few_rows.h"
_ATTENTION, _TILES = "kernels/attention.cpp", "attention_tiles.h"
_MEAN = "lane_dot(width, element, element)"
_HALVES = (
    "(lane_dot(width / 2, element, element) + lane_dot(width - width / 2, "
    "[&](int64_t i, int n) { return element(i + width / 2, n); }, "
    "[&](int64_t i, int n) { return element(i + width / 2, n); }))"
)

FAULTS: tuple[Fault, ...] = (
    # linear
    Fault("K runs backwards in each block", "linear", _GEMM, (("for (int64_t k = 0; k < depth; ++k) {\n    F32x16 b[V];", "for (int64_t k = depth - 1; k >= 0; --k) {\n    F32x16 b[V];"),), quick=True),
    Fault(
        "K runs backwards for few rows", "linear", _FEW,
        (("for (int j = 0; j < kStep; ++j) {", "for (int j = kStep - 1; j >= 0; --j) {"),), isa="avx512",
    ),
    Fault("segments are ignored", "linear", _LINEAR, (("k / segments, segments, sum)", "k, 1, sum)"),)),
    Fault(
        "the batch decides how K is cut", "linear", _LINEAR,
        (
            ("int64_t levels = 1;", "int64_t split = m > 100 && k % 2 == 0 && segments == 1 ? 2 : segments, levels = 2;"),
            ("k / segments, segments, sum)", "k / split, split, sum)"),
        ),
        quick=True,
    ),
    Fault("blocks of K start anew and are added", "linear", _GEMM, (("constexpr int64_t kDepth = 256;", "constexpr int64_t kDepth = 32;"), ("accumulate || i > 0);\n      }", "accumulate);\n      }"))),
    Fault(
        "weight gradient does not continue main_grad", "linear", _LINEAR,
        (("width, rows, own, k, true)", "width, rows, own, k, false)"),),
    ),
    Fault(
        "segments add from the left", "linear", _LINEAR,
        (
            ("int64_t half = segments / 2, size", "int64_t half = segments - 1, size"),
            ("segment_tree(right, rows, columns, depth, half, out + size)", "segment_tree(right, rows, columns, depth, 1, out + size)"),
        ),
    ),
    Fault(
        "subnormal numbers are flushed", "linear", _LINEAR,
        (("      float* sum = scratch(kTree, levels * tall * wide);", "      __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);\n      float* sum = scratch(kTree, levels * tall * wide);"),),
    ),
    # RMSNorm
    Fault("64 lanes for 128", "rms_norm", "lane_dot.h", (("constexpr int kVectors = 8;", "constexpr int kVectors = 4;"),)),
    Fault("multiply-adds are contracted", "rms_norm", flag=_CONTRACT),
    Fault(
        "the batch decides how a row is cut", "rms_norm", "kernels/rms_norm.cpp",
        ((f"float mean = {_MEAN}", f"float mean = (rows > 8 ? {_HALVES} : {_MEAN})"),),
    ),
    Fault("the sum is not rounded before the norm", "rms_norm", "kernels/rms_norm.cpp", (("        row = sum;\n", ""),)),
    Fault(
        "tokens run backwards in the weight gradient", "rms_norm", "kernels/rms_norm.cpp",
        (("for (int64_t r = 0; r < rows; ++r) {\n        F32x16 normed", "for (int64_t r = rows - 1; r >= 0; --r) {\n        F32x16 normed"),),
    ),
    Fault(
        "neighbours fold instead of halves", "rms_norm", "vec.h",
        (("_mm_add_ps(four, _mm_movehl_ps(four, four))", "_mm_add_ps(_mm_shuffle_ps(four, four, 0x88), _mm_shuffle_ps(four, four, 0xdd))"),),
    ),
    Fault("epsilon is added to the root", "rms_norm", "kernels/rms_norm.cpp", (("std::sqrt(mean + eps)", "(std::sqrt(mean) + eps)"),)),
    Fault(
        "a whole vector is written past the end of a row", "rms_norm", "kernels/rms_norm.cpp",
        (("        store_part_bf16(out, y + r * width + i, n);", "        out.store_bf16(y + r * width + i);"),),
    ),
    # elementwise
    Fault("multiply-adds are contracted", "rotary", flag=_CONTRACT),
    Fault(
        "one multiply-add is contracted", "rotary", "kernels/elementwise.cpp",
        (("x1 * cv - x2 * sv", "fma(x1, cv, F32x16::zero() - x2 * sv)"),), quick=True,
    ),
    Fault(
        "positions are off by one", "rotary", "kernels/elementwise.cpp",
        (("const float* c = cos + positions[t] * half;", "const float* c = cos + (positions[t] ? positions[t] - 1 : 0) * half;"),),
    ),
    Fault("the gradient is turned the same way", "rotary", "kernels/elementwise.cpp", (("if (inverse) sv = sv * F32x16::all(-1.0f);", "if (inverse) sv = sv + F32x16::zero();"),)),
    Fault("heads are taken as packed", "rotary", "kernels/elementwise.cpp", (("t * token_stride + h * head_stride", "t * token_stride + h * width"),)),
    Fault("positions wrap after 4096", "rotary", "kernels/elementwise.cpp", (("const float* s = sin + positions[t] * half;", "const float* s = sin + (positions[t] & 4095) * half;"),)),
    Fault("multiply-adds are contracted", "swiglu", flag=_CONTRACT),
    Fault(
        "products are reassociated", "swiglu", "kernels/elementwise.cpp",
        (("(gate * sigmoid(gate)) * up", "gate * (sigmoid(gate) * up)"),),
    ),
    Fault("rows are taken as packed", "swiglu", "kernels/elementwise.cpp", (("load_part_bf16(gate_up + r * stride + width + i, n);\n        store_part_bf16((gate", "load_part_bf16(gate_up + r * 2 * width + width + i, n);\n        store_part_bf16((gate"),)),
    Fault(
        "a polynomial coefficient is one bit off", "logprob", "primitives.h",
        (("0x1.c6af6cp-5f", "0x1.c6af6ep-5f"),),
    ),
    Fault(
        "tokens run backwards in the gradient", "embedding", "kernels/elementwise.cpp",
        (("for (int64_t t = 0; t < tokens; ++t) {\n      int64_t local = ids[t] - start;\n      if (local < 0", "for (int64_t t = tokens - 1; t >= 0; --t) {\n      int64_t local = ids[t] - start;\n      if (local < 0"),),
    ),
    Fault(
        "an id that another rank owns is clamped", "embedding", "kernels/elementwise.cpp",
        (("if (local >= 0 && local < rows)\n      std::memcpy", "local = local < 0 ? 0 : local < rows ? local : rows - 1;\n    if (rows > 0)\n      std::memcpy"),),
    ),
    # attention
    Fault(
        "the causal mask is off by one", "attention", _ATTENTION,
        (("positions_[row] + 1 - tile));", "positions_[row] + (positions_[row] == tile) - tile));"),),
    ),
    Fault("chunks of 1024 for 512", "attention", _TILES, (("constexpr int kChunk = 512;", "constexpr int kChunk = 1024;"),)),
    Fault(
        "P is not rounded", "attention", _ATTENTION,
        (("through_bf16(parts[v]).store(row", "parts[v].store(row"),),
    ),
    Fault(
        "a row sum is reassociated", "attention", _ATTENTION,
        (("(parts[0] + parts[2]) + (parts[1] + parts[3])", "(parts[0] + parts[1]) + (parts[2] + parts[3])"),),
    ),
    Fault(
        "a merge is not contracted", "attention", _ATTENTION,
        (("__builtin_fmaf(total.sum[r], scales[0], later.sum[r] * scales[1])", "total.sum[r] * scales[0] + later.sum[r] * scales[1]"),),
    ),
    Fault(
        "a stale page is read", "attention", "attention_call.h",
        (("block_table + b * block_table_stride + j / page_size", "block_table + b * block_table_stride + (j > page_size ? j - page_size : j) / page_size"),),
    ),
    Fault("the head dimension runs backwards", "attention", _TILES, (("for (int k = 0; k < count; ++k) {\n    F32x16 x[V];", "for (int k = count - 1; k >= 0; --k) {\n    F32x16 x[V];"),), quick=True),
    Fault(
        "dS is not rounded", "attention", "kernels/attention_backward.cpp",
        (("through_bf16(weight * (F32x16::load(ds + j) - delta)).store(ds + j)", "(weight * (F32x16::load(ds + j) - delta)).store(ds + j)"),),
    ),
    Fault("page sizes are powers of two", "attention", "attention_call.h", (("int64_t row = page_size ? j % page_size :", "int64_t row = page_size ? j & (page_size - 1) :"),)),
    Fault("a rescale near 1 is skipped", "attention", _ATTENTION, (("if (!acc || scales[i] == 1.0f) continue;", "if (!acc || scales[i] > 0.999f) continue;"),)),
    Fault("rows outside every sequence are left as they are", "attention", _ATTENTION, (("std::memset(call.out + used * row, 0, (call.tokens - used) * row * sizeof(uint16_t));", ""),)),
    Fault("a key loses its first row", "attention", "kernels/attention_backward.cpp", (("while (i < n && positions_[r + i] < tile + j) ++i;", "while (i < n && positions_[r + i] <= tile + j) ++i;"),)),
    Fault(
        "a slot below 0 is written", "attention", "bind_attention.cpp",
        (
            ("    if (slots[i] < 0) continue;\n", ""),
            ("cache + slots[i] / page_size * page + slots[i] % page_size * slot_stride", "cache + (slots[i] < 0 ? 0 : slots[i]) / page_size * page + (slots[i] < 0 ? 0 : slots[i]) % page_size * slot_stride"),
        ),
    ),
    # log-probability
    Fault(
        "the lowest window is lost", "logprob", "lse.h",
        (("void raise(int64_t to) {", "void raise(int64_t to) {\n    sum[kWindows - 1] = 0;"),),
    ),
    Fault("temperature is applied twice", "logprob", "lse.h", (("z : z / F32x16::all(temperature)", "z : (z / F32x16::all(temperature)) / F32x16::all(temperature)"),), quick=True),
    Fault("padded columns are counted", "logprob", "lse.h", (("for (int j = n; j % kLanes; ++j) { terms.q[j] = 0; terms.i[j] = INT32_MIN; }", ""),)),
    Fault("states merge without aligning", "logprob", "lse.h", (("    other.raise(top);\n", ""),)),
    Fault("the low part of log2(e) is lost", "logprob", "lse.h", (("  r = fma(z, F32x16::all(0x1.4ae0c0p-26f), r);\n", ""),)),
    Fault(
        "the target is missed at tile edges", "logprob", "logit_gradient.h",
        (("if (target >= j && target", "if (target > j && target"),),
    ),
    Fault("the first row's temperature counts for all", "logprob", "lse.h", (("each ? each[row] : all", "each ? each[0] : all"),)),
    Fault(
        "slabs of columns start anew", "logprob", "kernels/logprob_head.cpp",
        (("dhidden + r * depth + c, depth, true);", "dhidden + r * depth + c, depth, false);"),),
    ),
    Fault(
        "tokens run backwards in the bias gradient", "logprob", "kernels/logprob_head.cpp",
        (("for (int64_t r = 0; r < rows; ++r) sum = sum + load_part_bf16(dz", "for (int64_t r = rows - 1; r >= 0; --r) sum = sum + load_part_bf16(dz"),),
    ),
    # sampling
    Fault("nine rounds for ten", "sample", "kernels/sample.cpp", (("round < 10", "round < 9"),), quick=True),
    Fault("ties go to the highest id", "sample", "kernels/sample.cpp", (("logits[j] > logits[best]", "logits[j] >= logits[best]"),)),
    Fault("the position is ignored", "sample", "kernels/sample.cpp", (("b = static_cast<uint32_t>(position >> 32)", "b = 0 * (a = 0)"),)),
    # supports
    Fault(
        "ties go to the highest id", "sample_support", _SUPPORT,
        (
            ("32 | static_cast<uint64_t>(id);", "32 | (0xffffffffu - static_cast<uint64_t>(id));"),
            ("static_cast<int64_t>(place(n + k) & 0xffffffffu)", "static_cast<int64_t>(0xffffffffu - (place(n + k) & 0xffffffffu))"),
        ),
    ),
    Fault("top-k keeps one more", "sample_support", _SUPPORT, (("std::min(limit, top_k[r])", "std::min(limit, top_k[r] + 1)"),)),
    Fault(
        "top-p compares before it adds", "sample_support", _SUPPORT,
        (("if (sum >= wanted) return n + 1;", "if (sum >= wanted) return std::min(n + 2, limit);"),), quick=True,
    ),
    Fault("top-p takes its part of the whole row", "sample_support", _SUPPORT, (("if (limit == order.size()) {", "if (limit > 0) {"),)),
    Fault("min-p is halved", "sample_support", _SUPPORT, (("float_to_bits(min_p);", "float_to_bits(min_p * 0.5f);"),)),
    Fault(
        "tokens run backwards in the weight gradient", "sample_support", _KEPT,
        (("for (int64_t r = 0; r < kept.rows; ++r)\n      for", "for (int64_t r = kept.rows - 1; r >= 0; --r)\n      for"),),
    ),
    Fault(
        "the target is missed at block edges", "sample_support", _KEPT,
        (("return found != ids + count && *found == target", "return found != ids + count && found != ids && *found == target"),),
    ),
)  # fmt: skip
