"""Causal attention: packed (training, prefill), paged (chunked prefill, decode), for all rows or some."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from samebits.backends import lazy, pick, pick_arithmetic
from samebits.ops.attention import checks
from samebits.ops.attention.contract import ATTENTION as ATTENTION
from samebits.ops.attention.contract import ATTENTION_BACKWARD as ATTENTION_BACKWARD
from samebits.ops.attention.heads import HeadConstants as HeadConstants
from samebits.ops.attention.heads import prepare_heads as prepare_heads

BACKENDS = lazy("samebits.ops.attention", "cpu", "reference", "triton")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    q_positions: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    backend: str | None = None,
    arithmetic: str | None = None,
) -> torch.Tensor:
    """Packed causal attention with gradients: q [T, Hq, D], k, v [Tk, Hkv, D] bf16 -> [T, Hq, D] bf16.

    Sequence b holds the keys cu_seqlens[b] to cu_seqlens[b+1] (int32 [B+1], from 0). Its query rows are the
    same rows of q; or, with cu_seqlens_q (int32 [B+1]) and q_positions (int32 [T]), the rows cu_seqlens_q[b]
    to cu_seqlens_q[b+1], at non-descending positions of that sequence. Then the gradients of k and v are the
    part that comes from these rows. Rows outside every sequence give +0. Views with any token and head stride
    are read in place. `arithmetic` says how the dot products accumulate (the device's own where none is named).
    Raises ValueError on other dtypes, shapes, lengths or positions.
    """
    checks.packed(q, k, v, cu_seqlens, q_positions, cu_seqlens_q)
    impl = pick("attention", BACKENDS, backend, q, k, v, cu_seqlens, q_positions, cu_seqlens_q)
    kind = pick_arithmetic("attention", arithmetic, q)
    rows = cu_seqlens if cu_seqlens_q is None else cu_seqlens_q
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, rows, cu_seqlens, q_positions, scale, impl, kind)
    return impl.forward(q, k, v, rows, cu_seqlens, q_positions, scale, False, kind)[0]


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    backend: str | None = None,
    arithmetic: str | None = None,
    *,
    max_query_len: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [T, Hq, D] bf16 over a paged cache -> [T, Hq, D] bf16: prefill, extension and decode.

    kv_cache [blocks, Hkv, block_size, 2 D] bf16 (K then V; any strides but the last) already holds the new
    tokens. Request b has seq_lens[b] tokens in the pages block_table[b] (entries past its end are never read);
    its query rows query_start_loc[b] to query_start_loc[b+1] are its last tokens. Index tensors are int32.
    `max_query_len` bounds the rows of a request (also of those that a captured graph will see later), so that
    kernels which none needs are left out; `out`, contiguous, receives the result. Rows outside every request give
    +0. No gradients. Raises ValueError on other dtypes, shapes, lengths or page numbers.
    """
    checks.paged(q, kv_cache, block_table, seq_lens, query_start_loc, out)
    impl = pick("attention", BACKENDS, backend, q, kv_cache, block_table, seq_lens, query_start_loc, out)
    kind = pick_arithmetic("paged_attention", arithmetic, q)
    return impl.paged(q, kv_cache, block_table, seq_lens, query_start_loc, scale, kind, max_query_len, out)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    backend: str | None = None,
) -> None:
    """Copy key, value [T, Hkv, D] bf16 into the slots of kv_cache (slot = page * block_size + offset; int64).

    Slots below 0 are skipped; rows past the end of slot_mapping are padding. Raises ValueError on other dtypes
    or shapes and on a slot outside the cache.
    """
    checks.write(key, value, kv_cache, slot_mapping)
    pick("attention", BACKENDS, backend, key, value, kv_cache, slot_mapping).write_kv(
        key, value, kv_cache, slot_mapping
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens: torch.Tensor,
        q_positions: torch.Tensor | None,
        scale: float,
        impl: ModuleType,
        arithmetic: str,
    ) -> torch.Tensor:
        out, m, lsum = impl.forward(q, k, v, cu_seqlens_q, cu_seqlens, q_positions, scale, True, arithmetic)
        ctx.save_for_backward(q, k, v, out, m, lsum, cu_seqlens_q, cu_seqlens, q_positions)
        ctx.scale, ctx.impl, ctx.arithmetic = scale, impl, arithmetic
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor):
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        dq, dk, dv = ctx.impl.backward(dout, *ctx.saved_tensors, ctx.scale, ctx.arithmetic)
        return dq, dk, dv, None, None, None, None, None, None
