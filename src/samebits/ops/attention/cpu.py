"""The C++ kernels, called by address."""

from __future__ import annotations

import torch

from samebits import _cpu
from samebits.backends import serve_only
from samebits.ops.attention.scale import exponent_scale


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens: torch.Tensor,
    q_positions: torch.Tensor | None,
    scale: float,
    statistics: bool,
    arithmetic: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    serve_only("attention", "cpu", arithmetic, "fma32")
    tokens, heads, dim = q.shape
    out = q.new_empty(tokens, heads, dim)
    m, lsum = (q.new_empty(tokens, heads, dtype=torch.float32) if statistics else None for _ in range(2))
    _cpu.attention_packed(
        *_rows(q),
        *_rows(k),
        *_rows(v),
        cu_seqlens_q.data_ptr(),
        cu_seqlens.data_ptr(),
        0 if q_positions is None else q_positions.data_ptr(),
        cu_seqlens.shape[0] - 1,
        tokens,
        k.shape[0],
        heads,
        k.shape[1],
        dim,
        exponent_scale(scale),
        out.data_ptr(),
        0 if m is None else m.data_ptr(),
        0 if lsum is None else lsum.data_ptr(),
    )
    return out, m, lsum


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    lsum: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens: torch.Tensor,
    q_positions: torch.Tensor | None,
    scale: float,
    arithmetic: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    serve_only("attention", "cpu", arithmetic, "fma32")
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    _cpu.attention_backward(
        *_rows(q),
        *_rows(k),
        *_rows(v),
        *_rows(dout),
        cu_seqlens_q.data_ptr(),
        cu_seqlens.data_ptr(),
        0 if q_positions is None else q_positions.data_ptr(),
        cu_seqlens.shape[0] - 1,
        q.shape[0],
        k.shape[0],
        q.shape[1],
        k.shape[1],
        q.shape[2],
        exponent_scale(scale),
        scale,
        out.data_ptr(),
        m.data_ptr(),
        lsum.data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
    )
    return dq, dk, dv


def paged(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    arithmetic: str,
    max_query_len: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    serve_only("paged_attention", "cpu", arithmetic, "fma32")
    tokens, heads, dim = q.shape
    blocks, kv_heads, page_size, _ = kv_cache.shape
    page_stride, head_stride, slot_stride, _ = kv_cache.stride()
    out = q.new_empty(tokens, heads, dim) if out is None else out
    _cpu.attention_paged(
        *_rows(q),
        kv_cache.data_ptr(),
        blocks,
        page_size,
        page_stride,
        head_stride,
        slot_stride,
        block_table.data_ptr(),
        block_table.shape[1],
        block_table.stride(0),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.shape[0],
        tokens,
        heads,
        kv_heads,
        dim,
        exponent_scale(scale),
        out.data_ptr(),
    )
    return out


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    blocks, kv_heads, page_size, width = kv_cache.shape
    page_stride, head_stride, slot_stride, _ = kv_cache.stride()
    _cpu.write_kv(
        *_rows(key),
        *_rows(value),
        kv_cache.data_ptr(),
        page_stride,
        head_stride,
        slot_stride,
        blocks,
        page_size,
        slot_mapping.data_ptr(),
        slot_mapping.shape[0],
        kv_heads,
        width // 2,
    )


def _rows(x: torch.Tensor) -> tuple[int, int, int]:
    """Address, token stride and head stride of [tokens, heads, D]."""
    token, head, _ = x.stride()
    return x.data_ptr(), token, head
