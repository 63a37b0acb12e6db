"""The Triton kernels, on tensors of a CUDA or HIP device. Values of index tensors are not checked here: the device
does not wait for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends import device_arithmetic, serve_only
from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher, next_power_of_2
from samebits.ops.attention import hopper, launch, triton_backward, triton_fma32, triton_forward, triton_split
from samebits.ops.attention.contract import CHUNK
from samebits.ops.attention.registry import KERNELS as KERNELS
from samebits.ops.attention.scale import exponent_scale
from samebits.ops.attention.triton_write import copy_rows

FMA_ROWS = 16


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens: Tensor,
    q_positions: Tensor | None,
    scale: float,
    statistics: bool,
    arithmetic: str,
    how: launch.Rows | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As the definition; `how` overrides the launch: any of them gives the same bits."""
    out, m, lsum = _results(q, statistics, arithmetic)
    if how is None:
        how = _here(launch.forward(q.shape[2], hopper.suits_packed(q, k, v, q_positions, arithmetic)))
    if how.copies:
        hopper.forward_rows(q, k, v, out, m, lsum, cu_seqlens_q, cu_seqlens, scale, how)
        return out, m, lsum
    _rows(q, k, v, out, m, lsum, cu_seqlens_q, cu_seqlens, q_positions, None, 0, scale, arithmetic, 1, how)
    return out, m, lsum


def paged(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    arithmetic: str,
    max_query_len: int | None = None,
    out: Tensor | None = None,
    how: launch.Split | None = None,
    rows: launch.Rows | None = None,
) -> Tensor:
    """As the definition; requests with few rows have their chunks spread over programs, the others take `rows`."""
    out = _results(q, False, arithmetic, out)[0]
    size = kv_cache.shape[2]
    tokens, requests, group = q.shape[0], seq_lens.shape[0], q.shape[1] // kv_cache.shape[1]
    copies = hopper.suits(q, kv_cache, arithmetic)
    most = (tokens if max_query_len is None else max_query_len) * group  # rows of a request
    few = 0
    if arithmetic != "fma32":
        chunks = cdiv(block_table.shape[1] * size, CHUNK)
        how = how or _here(launch.split(min(tokens, requests), kv_cache.shape[1], group, chunks, copies))
        few = how.rows
        _split(q, kv_cache, out, seq_lens, query_start_loc, block_table, scale, how, chunks, few < most)
    if few < most:
        rows = rows or _here(launch.forward(q.shape[2], copies))
        if rows.copies:
            hopper.forward_pages(q, kv_cache, out, query_start_loc, seq_lens, block_table, few + 1, scale, rows)
            return out
        index = (query_start_loc, seq_lens, None, block_table, size)
        k, v = _keys_and_values(kv_cache)
        _rows(q, k, v, out, None, None, *index, scale, arithmetic, few + 1, rows)
    return out


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    copy_rows(key, value, kv_cache, slot_mapping)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    m: Tensor,
    lsum: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens: Tensor,
    q_positions: Tensor | None,
    scale: float,
    arithmetic: str,
    how: tuple[launch.Rows, launch.Keys] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the definition."""
    slow = arithmetic == "fma32"
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) if slow else _empty(x) for x in (q, k, v))
    tokens, heads, dim = q.shape
    kv_heads, requests = k.shape[1], cu_seqlens.shape[0] - 1
    delta, inverse = (torch.empty(tokens, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    rows = tokens * heads
    if rows:
        launcher(triton_backward.row_statistics)[(cdiv(rows, 8),)](
            dout, out, lsum, delta, inverse, slot("attention.row_statistics", q.device), rows, *dout.stride()[:2],
            HEADS=heads, D=dim, ROWS=8, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    shared = _shape(q, k, requests) | {"POSITIONS": q_positions is not None}
    index = (cu_seqlens_q, cu_seqlens, q_positions)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *dout.stride()[:2])
    numbers = (exponent_scale(scale), float(scale))
    inputs = (q, k, v, dout, m, inverse, delta)
    if slow:
        blocks = (cdiv(rows // kv_heads, FMA_ROWS) + requests) * kv_heads
        counter = slot("attention.fma32.query_gradients", q.device)
        triton_fma32.query_gradients[(blocks,)](
            *inputs, dq, *index, counter, requests, *strides, *numbers, ROWS=FMA_ROWS, num_warps=4, **shared
        )
        blocks = (cdiv(k.shape[0], 64) + requests) * kv_heads
        counter = slot("attention.fma32.key_gradients", q.device)
        triton_fma32.key_gradients[(blocks,)](
            *inputs, dk, dv, *index, counter, requests, *strides, *numbers, num_warps=4, **shared
        )
        return dq, dk, dv
    queries, keys = how or (_here(launch.query_gradients(dim)), _here(launch.key_gradients(dim)))
    blocks = (cdiv(rows // kv_heads, queries.rows) + requests + 1) * kv_heads
    launcher(triton_backward.query_gradients)[(blocks,)](
        *inputs, dq, *index, slot("attention.query_gradients", q.device), tokens, requests, *strides, *numbers,
        ROWS=queries.rows, STAGES=queries.stages, num_warps=queries.warps, **shared,
    )  # fmt: skip
    blocks = (cdiv(k.shape[0], keys.keys) + requests + 1) * kv_heads
    launcher(triton_backward.key_gradients)[(blocks,)](
        *inputs, dk, dv, *index, slot("attention.key_gradients", q.device), k.shape[0], requests, *strides, *numbers,
        ROWS=keys.rows, OWN=keys.keys, STAGES=keys.stages, num_warps=keys.warps, **shared,
    )  # fmt: skip
    return dq, dk, dv


def _results(
    q: Tensor, statistics: bool, arithmetic: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    serve_only("attention", "triton", arithmetic, "fma32", device_arithmetic(q.device))
    out = _empty(q) if out is None else out
    if arithmetic != "fma32":
        m = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if statistics else None
        return out, m, torch.empty_like(m) if m is not None else None
    m = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device) if statistics else None
    return out.zero_(), m, torch.zeros_like(m) if m is not None else None


def _rows(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, m: Tensor | None, lsum: Tensor | None, rows_of: Tensor,
    keys_of: Tensor, positions: Tensor | None, table: Tensor | None, size: int, scale: float, arithmetic: str,
    least: int, how: launch.Rows | None,
) -> None:  # fmt: skip
    tokens, heads, dim = q.shape
    kv_heads, requests = k.shape[-2], rows_of.shape[0] - 1
    group, page_stride = heads // kv_heads, k.stride(0) if table is not None else 0
    how = launch.Rows(FMA_ROWS, 4, 1) if arithmetic == "fma32" else how or _here(launch.forward(dim))
    blocks = cdiv(tokens * group, how.rows) + requests + 1
    kernel = triton_forward.forward_rows
    options = {"LEAST": least, "STAGES": how.stages}
    if arithmetic == "fma32":
        kernel, options = triton_fma32.forward_rows, {}
    name = f"attention.{'paged' if size else 'packed'}.{arithmetic}"
    launcher(kernel)[(blocks * kv_heads,)](
        q, k, v, out, m, lsum, rows_of, keys_of, positions, table, slot(name, q.device),
        tokens, requests, *q.stride()[:2], *k.stride()[-3:-1], *v.stride()[-3:-1], page_stride,
        0 if table is None else table.stride(0), exponent_scale(scale),
        SIZE=size, ROWS=how.rows, POSITIONS=positions is not None, STATISTICS=m is not None, num_warps=how.warps,
        **_shape(q, k, requests), **options,
    )  # fmt: skip


def _split(
    q: Tensor, kv_cache: Tensor, out: Tensor, lengths: Tensor, rows_of: Tensor, table: Tensor, scale: float,
    how: launch.Split, chunks: int, others: bool,
) -> None:  # fmt: skip
    """The requests with few rows and, unless there may be `others`, +0 in the rows outside all requests."""
    tokens, heads, dim = q.shape
    kv_heads, requests = kv_cache.shape[1], lengths.shape[0]
    k, v = _keys_and_values(kv_cache)
    group = heads // kv_heads
    held = min(tokens, requests * (how.rows // group))  # tokens of requests with few rows, at most
    states = torch.empty(0 if how.direct else chunks * held * heads * (dim + 2), dtype=torch.float32, device=q.device)
    acc, m, lsum = states.split([states.numel() // (dim + 2) * n for n in (dim, 1, 1)])
    by_request = held < tokens
    shared = _shape(q, k, requests) | {"MOST": how.rows, "DIRECT": how.direct, "BY_REQUEST": by_request}
    results = (out, m, lsum, acc, rows_of, lengths, table, slot("attention.chunk_states", q.device), held)
    if how.copies:
        hopper.chunk_states(q, kv_cache, *results, by_request, scale, how)
    else:
        # at most one block for a request with few rows
        launcher(triton_split.chunk_states)[(min(requests, tokens) * kv_heads, how.splits)](
            q, k, v, *results, how.splits, requests, *q.stride()[:2], *k.stride()[-3:-1], *v.stride()[-3:-1],
            k.stride(0), table.stride(0), exponent_scale(scale), SIZE=kv_cache.shape[2], ROWS=how.rows,
            STAGES=how.stages, num_warps=how.warps, **shared,
        )  # fmt: skip
    blocks = cdiv((held if others else tokens) * group, how.merge_rows) + requests + 1
    launcher(triton_split.merge_chunks)[(blocks * kv_heads,)](
        m, lsum, acc, out, rows_of, lengths, slot("attention.merge_chunks", q.device), tokens, held, requests,
        ROWS=how.merge_rows, AHEAD=how.ahead, num_warps=1, **shared,
    )  # fmt: skip


def _keys_and_values(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views [pages, slots, heads, D]."""
    dim = kv_cache.shape[3] // 2
    return kv_cache[..., :dim].transpose(1, 2), kv_cache[..., dim:].transpose(1, 2)


def _here(how: launch.Choice) -> launch.Choice:
    return how if torch.version.hip is None else launch.for_amd(how)


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _shape(q: Tensor, k: Tensor, requests: int) -> dict[str, int | bool]:
    """What every kernel is compiled for."""
    heads, dim = q.shape[1:]
    return {
        "HEADS": k.shape[-2],
        "GROUP": heads // k.shape[-2],
        "D": dim,
        "WIDTH": max(16, next_power_of_2(dim)),
        "BATCH": next_power_of_2(max(requests, 1)),
        "enable_fp_fusion": False,
    }
