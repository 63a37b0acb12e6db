"""The kernels as they are launched, for the audit of what the compiler makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samebits.ops.attention import (
    gluon_forward,
    gluon_split,
    launch,
    triton_backward,
    triton_fma32,
    triton_forward,
    triton_heads,
    triton_split,
    triton_write,
)

Constants = dict[str, Any]
Entry = tuple[str, Any, dict[str, str], Constants, dict[str, object]]

HEADS, GROUP, DIM = 8, 4, 128  # of Qwen3-8B
_SHAPE: Constants = {"HEADS": HEADS, "GROUP": GROUP, "D": DIM, "WIDTH": DIM, "BATCH": 8}
_BF16 = ("q", "k", "v", "out", "dout", "dq", "dk_out", "dv_out", "key", "value", "cache")
_FP32 = ("m_out", "l_out", "acc_out", "m_in", "l_in", "acc_in", "m", "lsum", "delta", "inverse")
_STRIDES = tuple(f"{name}_{axis}" for name in ("q", "k", "v", "do", "key", "value") for axis in ("token", "head"))
_SIZES = (
    "tokens",
    "held",
    "splits",
    "B",
    "rows",
    *_STRIDES,
    "page_stride",
    "table_stride",
    "head_stride",
    "slot_stride",
)
_TYPES = (
    dict.fromkeys(_BF16, "*bf16")
    | dict.fromkeys(_FP32, "*fp32")
    | dict.fromkeys(("rows_of", "keys_of", "positions", "table", "lengths"), "*i32")
    | dict.fromkeys(_SIZES, "i32")
    | {"counter": "*i64", "slots": "*i64", "c": "fp32", "factor": "fp32"}
)


def _entry(name: str, kernel: Any, constants: Constants, warps: int, targets: str | None, **more: Any) -> Entry:
    types = {n: t for n, t in _TYPES.items() if n in kernel.arg_names and n not in constants} | more.pop("types", {})
    divisible = (*_STRIDES, "page_stride", "head_stride", "slot_stride")
    return name, kernel, types, constants, {"num_warps": warps, "targets": targets, "divisible": divisible, **more}


def _matrix(targets: str) -> Iterator[Entry]:
    def of(how: Any) -> Any:
        return how if targets == "cuda" else launch.for_amd(how)

    rows = of(launch.forward(DIM))
    packed: Constants = {"SIZE": 0, "ROWS": rows.rows, "LEAST": 1, "STAGES": rows.stages, "table": None}
    for name, positions in (("packed", None), ("packed-positions", "*i32")):
        constants = _SHAPE | packed | {"POSITIONS": positions is not None, "STATISTICS": True}
        constants |= {} if positions else {"positions": None}
        yield _entry(name, triton_forward.forward_rows, constants, rows.warps, targets)
    paged: Constants = {
        "SIZE": 16,
        "ROWS": rows.rows,
        "LEAST": 17,
        "STAGES": rows.stages,
        "POSITIONS": False,
        "STATISTICS": False,
    }
    nothing: Constants = dict.fromkeys(("positions", "m_out", "l_out"))
    yield _entry("paged", triton_forward.forward_rows, _SHAPE | paged | nothing, rows.warps, targets)
    split = of(launch.split(8, HEADS, GROUP, 8))
    few: Constants = {
        "SIZE": 16,
        "ROWS": split.rows,
        "MOST": split.rows,
        "BY_REQUEST": False,
        "DIRECT": False,
        "STAGES": split.stages,
    }
    yield _entry("chunk_states", triton_split.chunk_states, _SHAPE | few, split.warps, targets)
    merge: Constants = {"ROWS": split.merge_rows, "MOST": split.rows, "AHEAD": split.ahead, "DIRECT": False}
    merge["BY_REQUEST"] = False
    yield _entry("merge_chunks", triton_split.merge_chunks, _SHAPE | merge, 1, targets)
    rows, keys = of(launch.query_gradients(DIM)), of(launch.key_gradients(DIM))
    backward: Constants = {"POSITIONS": False, "positions": None, "STAGES": rows.stages, "ROWS": rows.rows}
    yield _entry("query_gradients", triton_backward.query_gradients, _SHAPE | backward, rows.warps, targets)
    backward |= {"STAGES": keys.stages, "ROWS": keys.rows, "OWN": keys.keys}
    # 256 registers hold two gradients, two products and their operands but for some values outside of the loop
    spills = ("sm_90", "gfx942", "gfx950")
    yield _entry(
        "key_gradients", triton_backward.key_gradients, _SHAPE | backward, keys.warps, targets, spills_allowed=spills
    )


def _copies() -> Iterator[Entry]:
    """Hopper's own schedules."""
    tile = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    few: Constants = {"HEADS": HEADS, "GROUP": GROUP, "D": DIM, "SIZE": 16, "ROWS": 16, "DIRECT": False}
    box = f"tensordesc<bf16[16, {DIM}],{tile}>"
    for stages in (1, 2):
        yield _entry(
            f"copies.chunk_states-s{stages}", gluon_split.chunk_states,
            {**few, "BY_REQUEST": stages == 2, "STAGES": stages}, 1, "cuda", types={"cache": box},
        )  # fmt: skip
    rows = launch.forward(DIM, copies=True)
    whole: Constants = {"HEADS": HEADS, "GROUP": GROUP, "D": DIM, "BATCH": 8, "STAGES": rows.stages, "REGISTERS": 240}
    packed: Constants = {"SIZE": 0, "LEAST": 1, "STATISTICS": True, "table": None}
    paged: Constants = {"SIZE": 16, "LEAST": 17, "STATISTICS": False, "m_out": None, "l_out": None}
    for name, constants, rows_at_once, columns in (("packed", packed, 64, DIM), ("paged", paged, 16, 64)):
        copied = f"tensordesc<bf16[{rows_at_once}, {columns}],{tile}>"
        yield _entry(
            f"copies.{name}", gluon_forward.forward_rows, whole | constants, rows.warps, "cuda",
            types={"keys": copied, "values": copied},
        )  # fmt: skip


def _others() -> Iterator[Entry]:
    backward: Constants = {"POSITIONS": False, "positions": None}
    statistics: Constants = {"HEADS": HEADS * GROUP, "D": DIM, "ROWS": 8}
    yield _entry("row_statistics", triton_backward.row_statistics, statistics, 4, None)
    packed: Constants = {"SIZE": 0, "ROWS": 16, "STATISTICS": True, "table": None}
    slow: dict[str, Any] = {"spills_allowed": ("sm_90", "gfx942", "gfx950")}  # the slow form
    yield _entry("fma32.packed", triton_fma32.forward_rows, _SHAPE | backward | packed, 4, None, **slow)
    yield _entry(
        "fma32.query_gradients", triton_fma32.query_gradients, _SHAPE | backward | {"ROWS": 16}, 4, None, **slow
    )
    yield _entry("fma32.key_gradients", triton_fma32.key_gradients, _SHAPE | backward, 4, None, **slow)
    pages: Constants = {"HEADS": HEADS, "SIZE": 16, "D": DIM, "ROWS": HEADS, "WIDTH": DIM}
    yield _entry("write_pages", triton_write.write_pages, pages, 1, None)
    prepared: Constants = {"Q": HEADS * GROUP, "KV": HEADS, "HALF": DIM // 2, "SIZE": 16, "NORM": True}
    types = {"qkv": "*bf16", "positions": "*i64", "q_out": "*bf16", "kept": "i32", "qkv_token": "i32", "eps": "fp32"}
    types |= dict.fromkeys(("q_weight", "k_weight"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
    types |= dict.fromkeys(("rotary_counter", "norm_counter"), "*i64")
    yield _entry(
        "prepare_heads", triton_heads.prepare_heads, prepared | {"ROWS": triton_heads.ROWS}, 4, None, types=types
    )


KERNELS: tuple[Entry, ...] = (*_matrix("cuda"), *_matrix("hip"), *_copies(), *_others())
