"""Writing keys and values into the pages of a cache."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from samebits.arithmetic.triton import count_launch
from samebits.backends.device_counters import slot
from samebits.backends.launcher import launcher, next_power_of_2


@triton.jit
def write_pages(
    key, value, cache, slots, counter, key_token, key_head, value_token, value_head, page_stride, head_stride,
    slot_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program: one token, ROWS >= HEADS rows."""
    count_launch(counter)
    token = tl.program_id(0).to(tl.int64)
    to = tl.load(slots + token)
    if to < 0:
        return
    h = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    there = (h < HEADS)[:, None] & (d < D)[None, :]
    row = cache + (to // SIZE) * page_stride + (to % SIZE) * slot_stride + h[:, None] * head_stride + d[None, :]
    k = tl.load(key + token * key_token + h[:, None] * key_head + d[None, :], mask=there)
    v = tl.load(value + token * value_token + h[:, None] * value_head + d[None, :], mask=there)
    tl.store(row, k, mask=there)
    tl.store(row + D, v, mask=there)


def copy_rows(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Row by row into the slot's page; slots below 0 are skipped."""
    _, heads, size, width = kv_cache.shape
    if slot_mapping.shape[0] == 0:
        return
    launcher(write_pages)[(slot_mapping.shape[0],)](
        key, value, kv_cache, slot_mapping, slot("attention.write_pages", key.device),
        *key.stride()[:2], *value.stride()[:2], *kv_cache.stride()[:3], HEADS=heads, SIZE=size, D=width // 2,
        ROWS=next_power_of_2(heads), WIDTH=next_power_of_2(width // 2), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
