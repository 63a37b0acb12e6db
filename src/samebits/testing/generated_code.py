"""The rules for generated GPU code, checked on its text: PTX with its cubin, or AMD assembly."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# the instructions whose arithmetic has a name (sm90, cdna3), and MI350's form of it, which is not modelled
ALLOWED_MATRIX = {
    "sm_90": (
        r"(wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16"
        r"|mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32)"
    ),
    "gfx942": r"v_mfma_f32_16x16x16_bf16(_1k)?",
    "gfx950": r"v_mfma_f32_16x16x(16|32)_bf16(_1k)?",
}
SHARED_BYTES = {"sm_90": 232448, "gfx942": 65536, "gfx950": 163840}


@dataclass(frozen=True)
class Code:
    """One kernel: what was asked for (Triton's IR) and what the compiler made of it."""

    target: str
    ir: str
    text: str
    registers: int
    spills: int
    shared_bytes: int

    @classmethod
    def of(cls, target: str, asm: Mapping[str, str | bytes], shared_bytes: int) -> Code:
        """From the stages that Triton's compiler keeps."""
        ir = str(asm["ttir"] if "ttir" in asm else asm["ttgir"])  # Gluon starts with the second
        if target.startswith("sm_"):
            registers, spills = _cubin_usage(bytes(asm["cubin"]))  # type: ignore[arg-type]
            return cls(target, ir, str(asm["ptx"]), registers, spills, shared_bytes)
        text = str(asm["amdgcn"])
        spills = _number(r"\.vgpr_spill_count:\s*(\d+)", text) + _number(r"\.private_segment_fixed_size:\s*(\d+)", text)
        return cls(target, ir, text, _number(r"\.vgpr_count:\s*(\d+)", text), spills, shared_bytes)

    @property
    def matrix(self) -> set[str]:
        """The matrix instructions in it."""
        return set(re.findall(r"\b(wgmma\.mma_async[\w.]*|w?mma\.sync[\w.]*|v_s?mfma[ci]?_\w+|v_wmma_\w+)", self.text))


def violations(code: Code) -> list[str]:
    """The rules that this code breaks, in words; empty for none."""
    found = _matrix(code) + (_ptx(code) if code.target.startswith("sm_") else _amd(code))
    if code.spills:
        found.append(f"spills registers ({code.spills} stores, values or bytes)")
    if code.shared_bytes > SHARED_BYTES[code.target]:
        found.append(f"takes {code.shared_bytes} bytes of shared memory, {SHARED_BYTES[code.target]} exist")
    return found


def _matrix(code: Code) -> list[str]:
    products = "tt.dot" in code.ir or "warp_group_dot" in code.ir
    strange = sorted(name for name in code.matrix if not re.fullmatch(ALLOWED_MATRIX[code.target], name))
    found = [f"matrix instruction {name} is not the arithmetic's" for name in strange]
    if products and not code.matrix:
        found.append("asks for a matrix product and has no matrix instruction")
    if code.matrix and not products:
        found.append("has a matrix instruction that nobody asked for")
    return found


def _ptx(code: Code) -> list[str]:
    text = code.text
    found = [f"approximate {name}" for name in sorted(set(re.findall(r"\b\w+\.approx[\w.]*|\bdiv\.full[\w.]*", text)))]
    found += [f"flushes subnormals: {name}" for name in sorted(set(re.findall(r"\b\w+(?:\.\w+)*\.ftz[\w.]*", text)))]
    if re.search(r"\bfma\.rn\.f(32|64)", text) and not _writes_fma(code):
        found.append("a fused multiply-add that nobody wrote")
    atomics = re.findall(r"\b(?:atom|red)\.[\w.:]*(?:f16|bf16|f32|f64)\w*", text)
    return found + [f"floating-point atomic {name}" for name in sorted(set(atomics))]


def _amd(code: Code) -> list[str]:
    text = code.text
    names = re.findall(r"^\s+([vs]_\w+|\w*atomic\w+)", text, re.MULTILINE)
    found = []
    for kind in ("exp", "log", "sin", "cos"):
        if any(re.match(rf"v_{kind}_f(16|32|64)", name) for name in names):
            found.append(f"approximate v_{kind}")
    # correctly rounded division and square root start from an approximation and repair it
    exact = any(name.startswith(("v_div_fixup", "v_div_fmas")) for name in names)
    if any(name.startswith("v_rcp_f") for name in names) and not exact:
        found.append("approximate v_rcp")
    # division of integers starts from this one
    if any(name.startswith("v_rcp_iflag") for name in names) and not re.search(r"arith\.(div|rem)[su]i", code.ir):
        found.append("approximate v_rcp_iflag")
    if any(re.match(r"v_(sqrt|rsq)_f", name) for name in names) and "precise_sqrt" not in code.ir:
        found.append("approximate v_sqrt or v_rsq")
    repaired = exact or "precise_sqrt" in code.ir
    fused = any(re.match(r"v_(pk_)?(fma|fmac|fmamk|fmaak|mad|mac)_f(32|64)", name) for name in names)
    if fused and not repaired and not _writes_fma(code):
        found.append("a fused multiply-add that nobody wrote")
    atomics = sorted(
        {name for name in names if re.search(r"atomic_(pk_)?(add|min|max|fadd|fmin|fmax)_(b?f16|f32|f64)", name)}
    )
    found += [f"floating-point atomic {name}" for name in atomics]
    if not re.search(r"\.amdhsa_float_denorm_mode_32\s+3", text):
        found.append("flushes subnormals of fp32")
    return found


def _writes_fma(code: Code) -> bool:
    return "math.fma" in code.ir or "llvm.fma" in code.ir or "__nv_fma" in code.ir


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the generated code has no {pattern}")
    return int(match[1])


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, stores to its stack) of a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    handle, name = tempfile.mkstemp(suffix=".cubin")
    try:
        os.write(handle, cubin)
        os.close(handle)
        command = [str(tool), "--dump-resource-usage", "--dump-sass", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        Path(name).unlink()
    return _number(r"REG:(\d+)", done.stdout), len(re.findall(r"\bSTL\b", done.stdout))
