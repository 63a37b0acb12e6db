"""The kernels as they are launched, for the audit of what the compiler makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samebits.ops.linear import kernels
from samebits.ops.linear.launch import Launch, for_amd

Entry = tuple[str, Any, dict[str, str], dict[str, object], dict[str, object]]

_SIZES = {"M": "i32", "N": "i32", "K": "i32"}


def _descriptor(rows: int, k: int, transposed: bool, dtype: str = "bf16") -> str:
    return f"tensordesc<{dtype}[{k}, {rows}]>" if transposed else f"tensordesc<{dtype}[{rows}, {k}]>"


def _tma(how: Launch, a_t: bool, b_t: bool, bf16: bool, segments: int, keep_c: bool, targets: str) -> Entry:
    out, row_bytes = "bf16" if bf16 else "fp32", 256 if how.kernel == "persistent" else 128
    subtiles = max(1, how.block_n * (2 if bf16 else 4) // row_bytes)
    types = {
        "a_desc": _descriptor(how.block_m, how.block_k, a_t),
        "b_desc": _descriptor(how.block_n, how.block_k, b_t),
        "c_desc": _descriptor(how.block_m, how.block_n // subtiles, False, out),
        "counter": "*i64",
        **_SIZES,
    }
    constants: dict[str, object] = {
        "A_T": a_t, "B_T": b_t, "BLOCK_M": how.block_m, "BLOCK_N": how.block_n, "BLOCK_K": how.block_k,
        "GROUP": how.group, "SUBTILES": subtiles, "HAS_BIAS": False, "OUT_BF16": bf16,
    }  # fmt: skip
    kernel = kernels.matmul_persistent
    if how.kernel == "tile":
        kernel = kernels.matmul_tile
        types |= (
            {"stride_c": "i32"} | ({"c": "*fp32"} if keep_c else {}) | ({"partials": "*fp32"} if segments > 1 else {})
        )
        constants |= {"SEGMENTS": segments, "CONTINUE": keep_c}
    marks = f"{'-at' * a_t}{'-bt' * b_t}-{out}{f'-segments{segments}' * (segments > 1)}{'-continued' * keep_c}"
    return f"{how.name}{marks}", kernel, types, constants, _options(how, targets)


def _strided(how: Launch, bf16: bool, targets: str) -> Entry:
    types = {"a": "*bf16", "b": "*bf16", "c": "*bf16" if bf16 else "*fp32", "counter": "*i64", "M": "i32", "N": "i32"}
    types |= dict.fromkeys(("width", "a_row", "b_row", "stride_c"), "i32")
    constants: dict[str, object] = {"a_k": 1, "b_k": 1, "CONTINUE": False, "HAS_BIAS": False, "OUT_BF16": bf16}
    constants |= {"BLOCK_M": how.block_m, "BLOCK_N": how.block_n}
    if how.kernel == "fma":
        return "fma", kernels.matmul_fma, types, constants, _options(how, targets)
    constants |= {"BLOCK_K": how.block_k, "SWAPPED": how.swapped, "EVEN": True, "REPEAT": how.repeat}
    return how.name, kernels.matmul_any, types, constants, _options(how, targets)


def _options(how: Launch, targets: str) -> dict[str, object]:
    divisible = ("N", "K", "width", "a_row", "b_row", "stride_c")
    # MI350 computes in fma32 until its matrix unit is known; the other one waits for the end of the loop (one value)
    spills = ("gfx950", "sm_90") if (how.block_m, how.block_k, how.warps) == (16, 256, 2) else ("gfx950",)
    sizes: dict[str, object] = {"num_warps": how.warps, "num_stages": how.stages}
    return sizes | {"targets": targets, "divisible": divisible, "spills_allowed": spills}


def _entries() -> Iterator[Entry]:
    large, half = Launch("persistent", 128, 256, 64, 8, 4), Launch("persistent", 128, 128, 64, 4, 4)
    continued, tree = Launch("tile", 128, 256, 64, 8, 3), Launch("tile", 128, 128, 64, 8, 4)
    sixty_four = (Launch("persistent", 64, 64, 128, 4, 5), Launch("persistent", 64, 32, 256, 4, 4))
    for how in (large, half, *sixty_four):
        yield _tma(how, False, False, True, 1, False, "cuda")
    yield _tma(Launch("persistent", 128, 256, 64, 8, 3), False, False, False, 1, False, "cuda")
    yield _tma(large, False, True, True, 1, False, "cuda")
    yield _tma(continued, False, True, False, 1, True, "cuda")
    few = [
        Launch("any", 16, 16, 256, 2, 5, swapped=True), Launch("any", 16, 64, 128, 4, 4, swapped=True),
        Launch("any", 16, 16, 512, 4, 4, swapped=True), Launch("any", 32, 32, 256, 4, 4, swapped=True),
        Launch("any", 64, 64, 32, 4, 3), Launch("any", 16, 16, 512, 2, 4, swapped=True, repeat=True),
    ]  # fmt: skip
    for targets, of in (("cuda", lambda how: how), ("hip", for_amd)):
        if targets == "hip":
            yield _tma(of(large), False, False, True, 1, False, targets)
            yield _tma(of(large), False, True, True, 1, False, targets)
        yield _tma(of(continued), True, True, False, 1, True, targets)
        yield _tma(of(tree), False, False, True, 8, False, targets)
        for how in few:
            yield _strided(of(how), True, targets)
        yield _strided(Launch("fma", 32, 32, 1, 4, 3), False, targets)
    sums = {"x": "*bf16", "buffer": "*fp32", "counter": "*i64", "M": "i32", "N": "i32", "stride": "i32"}
    yield "bias_grad", kernels.column_sums, sums, {"BLOCK": 64, "ROWS": 16}, {"num_warps": 2}
    parts = {"partials": "*fp32", "c": "*bf16", "counter": "*i64", "elements": "i32", "N": "i32"}
    constants: dict[str, object] = {"SEGMENTS": 8, "HAS_BIAS": False, "OUT_BF16": True, "BLOCK": 1024}
    yield "add_segments", kernels.add_segments, parts, constants, {}


KERNELS: tuple[Entry, ...] = tuple(_entries())
