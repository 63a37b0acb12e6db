"""What attention refuses, and why, before any backend runs."""

from __future__ import annotations

import torch

MAX_HEAD_DIM = 512


def heads(op: str, q: torch.Tensor, kv_heads: int, head_dim: int) -> None:
    """q must be [T, Hq, D] bf16 with unit inner stride, Hq a multiple of the kv heads."""
    _bf16(op, "q", q, 3)
    if q.shape[2] != head_dim or not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"{op}: head_dim of q is {q.shape[2]} and of the keys {head_dim}; "
            f"they must agree and lie in [1, {MAX_HEAD_DIM}]"
        )
    if kv_heads < 1 or q.shape[1] < 1 or q.shape[1] % kv_heads:
        raise ValueError(f"{op}: {q.shape[1]} query heads are not a multiple of {kv_heads} kv heads")


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    q_positions: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
) -> None:
    _bf16("attention", "k", k, 3)
    _bf16("attention", "v", v, 3)
    if k.shape != v.shape:
        raise ValueError(f"attention: k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    heads("attention", q, k.shape[1], k.shape[2])
    _index("attention", "cu_seqlens", cu_seqlens, None)
    if not len(cu_seqlens):
        raise ValueError("attention: cu_seqlens must start with a 0, got no elements")
    if (q_positions is None) != (cu_seqlens_q is None):
        raise ValueError("attention: give q_positions and cu_seqlens_q together, or neither")
    if q_positions is not None and cu_seqlens_q is not None:
        _index("attention", "q_positions", q_positions, q.shape[0])
        _index("attention", "cu_seqlens_q", cu_seqlens_q, cu_seqlens.shape[0])


def cache(op: str, kv_cache: torch.Tensor) -> None:
    _bf16(op, "kv_cache", kv_cache, 4)
    if not kv_cache.shape[2]:
        raise ValueError(f"{op}: a page must hold at least one token, got {list(kv_cache.shape)}")
    if kv_cache.shape[3] % 2:
        raise ValueError(
            f"{op}: the last axis of kv_cache holds K then V, so it must be even, got {list(kv_cache.shape)}"
        )


def paged(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    cache("paged_attention", kv_cache)
    heads("paged_attention", q, kv_cache.shape[1], kv_cache.shape[3] // 2)
    _index("paged_attention", "seq_lens", seq_lens, None)
    _index("paged_attention", "query_start_loc", query_start_loc, seq_lens.shape[0] + 1)
    if block_table.dim() != 2 or block_table.shape[0] < seq_lens.shape[0] or block_table.dtype != torch.int32:
        raise ValueError(
            f"paged_attention: block_table must be int32 [>= {seq_lens.shape[0]}, pages], "
            f"got {block_table.dtype} {list(block_table.shape)}"
        )
    if block_table.stride(1) != 1 and block_table.shape[1] > 1:
        raise ValueError(f"paged_attention: the pages of a request must be adjacent, got {block_table.stride()}")
    if out is not None and (out.dtype != q.dtype or out.shape != q.shape or not out.is_contiguous()):
        raise ValueError(
            f"paged_attention: out must be contiguous bfloat16 {list(q.shape)}, got {out.dtype} {list(out.shape)} "
            f"with strides {out.stride()}"
        )


def write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    cache("write_kv", kv_cache)
    for name, x in (("key", key), ("value", value)):
        _bf16("write_kv", name, x, 3)
        if x.shape[0] < slot_mapping.shape[0] or x.shape[1:] != (kv_cache.shape[1], kv_cache.shape[3] // 2):
            raise ValueError(
                f"write_kv: {name} must be [>= {slot_mapping.shape[0]}, {kv_cache.shape[1]}, "
                f"{kv_cache.shape[3] // 2}] for this cache, got {list(x.shape)}"
            )
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or not slot_mapping.is_contiguous():
        raise ValueError(f"write_kv: slot_mapping must be contiguous int64 [T], got {slot_mapping.dtype}")


def _bf16(op: str, name: str, x: torch.Tensor, dims: int) -> None:
    if x.dtype != torch.bfloat16 or x.dim() != dims:
        raise ValueError(f"{op}: {name} must be bfloat16 with {dims} axes, got {x.dtype} {list(x.shape)}")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{op}: the last axis of {name} must have stride 1, got strides {x.stride()}")


def _index(op: str, name: str, x: torch.Tensor, length: int | None) -> None:
    if x.dtype != torch.int32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous int32 with one axis, got {x.dtype} {list(x.shape)}")
    if length is not None and x.shape[0] != length:
        raise ValueError(f"{op}: {name} must have {length} elements, got {x.shape[0]}")


def packed_values(
    tokens: int,
    keys: int,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens: torch.Tensor,
    q_positions: torch.Tensor | None,
) -> None:
    """As the kernels check before they read: offsets inside the tensors, positions inside their sequence."""
    _offsets("attention: cu_seqlens_q", cu_seqlens_q, tokens)
    _offsets("attention: cu_seqlens", cu_seqlens, keys)
    if q_positions is None:
        return
    for b, length in enumerate(cu_seqlens.diff().tolist()):
        rows = q_positions[int(cu_seqlens_q[b]) : int(cu_seqlens_q[b + 1])].tolist()
        if rows and (rows[0] < 0 or rows[-1] >= length or rows != sorted(rows)):
            raise ValueError(
                f"attention: q_positions of sequence {b} must be non-descending and in [0, {length}), "
                f"got {rows[0]} to {rows[-1]}"
            )


def paged_values(
    tokens: int,
    blocks: int,
    block_size: int,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    _offsets("paged_attention: query_start_loc", query_start_loc, tokens)
    for b, (length, rows) in enumerate(zip(seq_lens.tolist(), query_start_loc.diff().tolist(), strict=True)):
        pages = -(-length // block_size)
        if length < rows or pages > block_table.shape[1]:
            raise ValueError(
                f"paged_attention: request {b} has {length} tokens, {rows} query rows and room for "
                f"{block_table.shape[1]} pages of {block_size}"
            )
        used = block_table[b, :pages].tolist()
        if used and (min(used) < 0 or max(used) >= blocks):
            raise ValueError(f"paged_attention: request {b} uses a page outside [0, {blocks})")


def slots(slot_mapping: torch.Tensor, capacity: int) -> None:
    if slot_mapping.numel() and int(slot_mapping.max()) >= capacity:
        raise ValueError(f"write_kv: slot {int(slot_mapping.max())} is outside a cache of {capacity} slots")


def _offsets(what: str, offsets: torch.Tensor, end: int) -> None:
    ends = offsets.tolist()
    if not ends or ends[0] != 0 or ends[-1] > end or ends != sorted(ends):
        raise ValueError(f"{what} must start at 0, ascend and end by {end}, got {ends[:1]} to {ends[-1:]}")
