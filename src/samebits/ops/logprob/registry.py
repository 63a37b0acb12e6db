"""The kernels as they are launched, for the audit of what the compiler makes of them."""

from __future__ import annotations

from typing import Any

from samebits.ops.logprob import kernels

Entry = tuple[str, Any, dict[str, str], dict[str, object], dict[str, object]]

_ROWS = {"logits": "*fp32", "temperature": "fp32", "counter": "*i64"}
_STATE = {"states": "*i64", "counter": "*i64"}
_ONE: dict[str, object] = {"PER_ROW": False, "DIVIDE": False}
_EACH: dict[str, object] = {"PER_ROW": True, "DIVIDE": True}


def _states(name: str, temperature: dict[str, object], pick: bool) -> Entry:
    types = _ROWS | _STATE | ({"temperatures": "*fp32"} if temperature["PER_ROW"] else {})
    sizes = ("rows", "columns", "stride", "width", "splits", "first_column", "first_split", "all_splits")
    types |= dict.fromkeys(sizes, "i32") | ({"targets": "*i64", "picked": "*i64"} if pick else {})
    constants = temperature | {"PICK": pick, "BLOCK": 512}
    return name, kernels.row_states, types, constants, {"num_warps": 1, "divisible": ("columns", "stride", "width")}


def _finish(name: str, given: bool, temperature: dict[str, object]) -> Entry:
    types = _STATE | {"out": "*fp32"} | dict.fromkeys(("count", "per_row", "columns", "stride"), "i32")
    types |= {"z": "*fp32"} if given else {"logits": "*fp32", "targets": "*i64"}
    types |= {"temperatures": "*fp32"} if temperature["PER_ROW"] else {"temperature": "fp32"}
    return name, kernels.finish_logp, types, temperature | {"GIVEN": given, "BLOCK": 128}, {}


def _gradient() -> Entry:
    types = _ROWS | {"upstream": "*fp32", "lse": "*fp32", "targets": "*i64", "dz": "*bf16"}
    types |= dict.fromkeys(("rows", "columns", "stride", "dz_stride", "first_column"), "i32")
    options = {"num_warps": 1, "divisible": ("columns", "stride", "dz_stride")}
    return "logit_gradient", kernels.logit_gradient, types, _ONE | {"BLOCK": 512}, options


KERNELS: tuple[Entry, ...] = (
    _states("row_states", _ONE, False),
    _states("row_states-picked", _EACH, True),
    ("merge_states", kernels.merge_states, _STATE | {"out": "*i64", "splits": "i32", "out_stride": "i32"},
     {"BLOCK": 32}, {"num_warps": 1}),
    ("finish_lse", kernels.finish_lse, _STATE | {"out": "*fp32", "rows": "i32"}, {"BLOCK": 128}, {}),
    _finish("finish_logp", False, _EACH),
    _finish("finish_logp-given", True, _ONE),
    _gradient(),
)  # fmt: skip
