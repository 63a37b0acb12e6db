"""Launching the Gluon kernels: second schedules, for Hopper, of what the Triton kernels compute."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher, next_power_of_2
from samebits.ops.attention import gluon_forward, gluon_split, launch
from samebits.ops.attention.scale import exponent_scale

_BOX = 16  # keys that are copied at once from pages
_TILE = 64  # and from packed keys


def suits(q: Tensor, kv_cache: Tensor, arithmetic: str) -> bool:
    """Can the Gluon kernels serve this cache? Pages of a multiple of 16 tokens, one after the other, D of 64 or 128."""
    return (
        arithmetic == "sm90"
        and torch.version.hip is None
        and q.shape[2] in (64, 128)
        and kv_cache.shape[2] % _BOX == 0
        and kv_cache.is_contiguous()
        and kv_cache.data_ptr() % 16 == 0
        and kv_cache.numel() // kv_cache.shape[3] < 2**31
    )


def suits_packed(q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor | None, arithmetic: str) -> bool:
    """Can forward_rows serve these tensors? Heads side by side, D of 64 or 128, rows that end their sequence."""
    return (
        arithmetic == "sm90"
        and torch.version.hip is None
        and q_positions is None
        and q.shape[2] in (64, 128)
        and k.shape[0] > 0
        and all(x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (k, v))
    )


def forward_rows(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, m: Tensor | None, lsum: Tensor | None, rows_of: Tensor,
    keys_of: Tensor, scale: float, how: launch.Rows,
) -> None:  # fmt: skip
    tokens, heads, dim = q.shape
    kv_heads, requests = k.shape[1], rows_of.shape[0] - 1
    group = heads // kv_heads
    layout = gl.NVMMASharedLayout.get_default_for([_TILE, dim], gl.bfloat16)
    width = kv_heads * dim
    keys, values = (TensorDescriptor(x, [x.shape[0], width], [x.stride(0), 1], [_TILE, dim], layout) for x in (k, v))
    blocks = cdiv(tokens * group, how.rows) + requests + 1
    launcher(gluon_forward.forward_rows)[(blocks * kv_heads,)](
        keys, values, q, out, m, lsum, rows_of, keys_of, None, slot("attention.packed.copies", q.device), tokens,
        requests, *q.stride()[:2], 0, exponent_scale(scale), HEADS=kv_heads, GROUP=group, D=dim,
        BATCH=next_power_of_2(max(requests, 1)), SIZE=0, LEAST=1, STATISTICS=m is not None, STAGES=how.stages,
        REGISTERS=240, num_warps=how.warps, enable_fp_fusion=False,
    )  # fmt: skip


def forward_pages(
    q: Tensor, kv_cache: Tensor, out: Tensor, rows_of: Tensor, lengths: Tensor, table: Tensor, least: int, scale: float,
    how: launch.Rows,
) -> None:  # fmt: skip
    """The requests of at least `least` (token, head) rows, their keys in pages."""
    (tokens, heads, dim), (_, kv_heads, size, width) = q.shape, kv_cache.shape
    requests, group = lengths.shape[0], heads // kv_heads
    rows = kv_cache.view(-1, width)
    layout = gl.NVMMASharedLayout.get_default_for([_BOX, 64], gl.bfloat16)
    cache = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [_BOX, 64], layout)
    blocks = cdiv(tokens * group, how.rows) + requests + 1
    launcher(gluon_forward.forward_rows)[(blocks * kv_heads,)](
        cache, cache, q, out, None, None, rows_of, lengths, table, slot("attention.paged.copies", q.device), tokens,
        requests, *q.stride()[:2], table.stride(0), exponent_scale(scale), HEADS=kv_heads, GROUP=group, D=dim,
        BATCH=next_power_of_2(max(requests, 1)), SIZE=size, LEAST=least, STATISTICS=False, STAGES=how.stages,
        REGISTERS=240, num_warps=how.warps, enable_fp_fusion=False,
    )  # fmt: skip


def chunk_states(
    q: Tensor, kv_cache: Tensor, out: Tensor, m: Tensor, lsum: Tensor, acc: Tensor, rows_of: Tensor, lengths: Tensor,
    table: Tensor, counter: Tensor, held: int, by_request: bool, scale: float, how: launch.Split,
) -> None:  # fmt: skip
    _, kv_heads, size, width = kv_cache.shape
    dim = width // 2
    rows = kv_cache.view(-1, width)
    layout = gl.NVMMASharedLayout.get_default_for([_BOX, dim], gl.bfloat16)
    cache = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [_BOX, dim], layout)
    launcher(gluon_split.chunk_states)[(lengths.shape[0] * kv_heads, how.splits)](
        cache, q, out, m, lsum, acc, rows_of, lengths, table, counter, held, how.splits, *q.stride()[:2],
        table.stride(0), exponent_scale(scale), HEADS=kv_heads, GROUP=q.shape[1] // kv_heads, D=dim, SIZE=size,
        ROWS=how.rows, BY_REQUEST=by_request, DIRECT=how.direct, STAGES=how.stages, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
