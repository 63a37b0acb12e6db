"""The definition of attention by bits: online softmax over tiles inside chunks, chunks merged in order.

The recurrence is that of M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; the
orders are the contract's. Inside this file heads come first: q [H, n, D], k and v [H, L, D], state [H, n].
What differs under the arithmetic of a matrix unit is in matrix_form.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from samebits.arithmetic import dot, exp2, fma, fold_halves, lane_dot
from samebits.ops.attention import checks, matrix_form
from samebits.ops.attention.contract import CHUNK, LANES, SUM_LANES, TILE
from samebits.ops.attention.scale import exponent_scale

NAN = float("nan")


@dataclass(frozen=True)
class State:
    """Softmax over the keys seen so far: the largest exponent, the sum and the weighted values."""

    m: torch.Tensor  # [H, n]
    lsum: torch.Tensor  # [H, n]; inside a chunk [H, n, SUM_LANES] under the arithmetic of a matrix unit
    acc: torch.Tensor  # [H, n, D]

    def rows(self, which: torch.Tensor) -> State:
        return State(self.m[:, which], self.lsum[:, which], self.acc[:, which])

    def replaced(self, which: torch.Tensor, rows: State) -> State:
        m, lsum, acc = self.m.clone(), self.lsum.clone(), self.acc.clone()
        m[:, which], lsum[:, which], acc[:, which] = rows.m, rows.lsum, rows.acc
        return State(m, lsum, acc)

    def parts(self) -> matrix_form.Parts:
        return self.m, self.lsum, self.acc


def empty_state(q: torch.Tensor, lanes: tuple[int, ...] = ()) -> State:
    m = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    return State(m, q.new_zeros(*q.shape[:2], *lanes), torch.zeros_like(q))


def chain(
    a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor, valid: torch.Tensor | None = None, arithmetic: str = "fma32"
) -> torch.Tensor:
    """acc [.., M, N] + a [.., M, K] b [.., K, N], k ascending, a and b of bf16 values; only where valid [M, K]."""
    if arithmetic == "fma32":
        return _chain_of_fma(a, b, acc, valid)
    rows = a if valid is None else torch.where(valid, a, 0.0)
    return dot(rows.bfloat16(), b.transpose(-1, -2).bfloat16(), acc, arithmetic)


def _chain_of_fma(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    exact = _exact_products(a, b)
    for k in range(a.shape[-1]):
        x, y = a[..., k, None], b[..., k, None, :]
        # one addition is the whole fma when the product of two bf16 values is exact in fp32
        step = acc + x * y if exact else fma(x, y, acc)
        acc = step if valid is None else torch.where(valid[:, k, None], step, acc + 0.0)
    return acc


def _exact_products(a: torch.Tensor, b: torch.Tensor) -> bool:
    """No product overflows or falls under the normal range of fp32, so 8 + 8 bits always fit."""
    x, y = a.abs().double(), b.abs().double()
    if x.numel() == 0 or y.numel() == 0:
        return True
    least = torch.where(x == 0, 1.0, x).amin() * torch.where(y == 0, 1.0, y).amin()
    return bool(least >= 2.0**-126) and bool(x.amax() * y.amax() < 2.0**127)


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(x), torch.tensor(NAN, dtype=torch.bfloat16, device=x.device), x.bfloat16())


def add_tile(
    state: State,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    valid: torch.Tensor,
    c: float,
    arithmetic: str,
) -> State:
    """One tile of keys k, v [H, TILE, D], of which row i attends to those with valid [n, TILE]."""
    if arithmetic != "fma32":
        return State(*matrix_form.add_tile(state.parts(), q, k, v, valid, c, arithmetic))
    s = chain(q, k.transpose(-1, -2), q.new_zeros(*q.shape[:2], TILE))
    t = s * c
    largest = torch.where(valid & ~torch.isnan(t), t, -torch.inf).amax(-1)
    m = torch.maximum(state.m, largest)
    a = exp2(state.m - m)
    p = torch.where(valid, exp2(t - m[..., None]), 0.0)
    lsum = fma(state.lsum, a, fold_halves(p))
    acc = chain(to_bf16(p).float(), v, state.acc * a[..., None], valid)
    return State(m, lsum, acc)


def merge(state: State, later: State, arithmetic: str) -> State:
    """The state over an earlier run of chunks and over the chunk that follows it."""
    if arithmetic != "fma32":
        return State(*matrix_form.merge(state.parts(), later.parts()))
    m = torch.maximum(state.m, later.m)
    a, b = exp2(state.m - m), exp2(later.m - m)
    lsum = fma(state.lsum, a, later.lsum * b)
    acc = fma(state.acc, a[..., None], later.acc * b[..., None])
    return State(m, lsum, acc)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, c: float, arithmetic: str
) -> State:
    """Query rows q [H, n, D] at `positions` [n] over the keys of their sequence; fp32 of bf16 values."""
    total = empty_state(q)
    lanes = () if arithmetic == "fma32" else (SUM_LANES,)
    for chunk in range(0, k.shape[1], CHUNK):
        reached = positions >= chunk
        state = empty_state(q, lanes)
        for tile in range(chunk, min(chunk + CHUNK, k.shape[1]), TILE):
            live = positions >= tile
            valid = tile + torch.arange(TILE, device=q.device) <= positions[live, None]
            keys, values = (_padded(x[:, tile : tile + TILE]) for x in (k, v))
            added = add_tile(state.rows(live), q[:, live], keys, values, valid, c, arithmetic)
            state = state.replaced(live, added)
        if lanes:
            state = State(state.m, fold_halves(state.lsum), state.acc)
        if chunk > 0:
            state = merge(total.rows(reached), state.rows(reached), arithmetic)
            total = total.replaced(reached, state)
        else:
            total = state
    return total


def normalised(state: State, arithmetic: str) -> torch.Tensor:
    """[H, n, D]: acc / l, or acc * (1 / l)."""
    if arithmetic == "fma32":
        return state.acc / state.lsum[..., None]
    return state.acc * (1.0 / state.lsum)[..., None]


def _padded(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, TILE - x.shape[1]))


def _heads_first(x: torch.Tensor, repeat: int = 1) -> torch.Tensor:
    return x.float().transpose(0, 1).repeat_interleave(repeat, dim=0)


def _sequences(
    cu_seqlens_q: torch.Tensor, cu_seqlens: torch.Tensor, q_positions: torch.Tensor | None
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Query rows, keys and positions of each sequence that has query rows."""
    q_ends, ends = cu_seqlens_q.tolist(), cu_seqlens.tolist()
    for b in range(len(ends) - 1):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(ends[b], ends[b + 1])
        if rows.start < rows.stop:
            every = torch.arange(keys.stop - keys.start, device=cu_seqlens.device)
            yield rows, keys, every if q_positions is None else q_positions[rows]


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
    """(out [T, Hq, D] bf16, m and l [T, Hq] fp32 for backward); rows outside every sequence are +0."""
    checks.packed_values(q.shape[0], k.shape[0], cu_seqlens_q, cu_seqlens, q_positions)
    out, m = torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)
    lsum = torch.zeros_like(m)
    group = q.shape[1] // k.shape[1]
    for rows, keys, positions in _sequences(cu_seqlens_q, cu_seqlens, q_positions):
        kh, vh = _heads_first(k[keys], group), _heads_first(v[keys], group)
        state = attend(_heads_first(q[rows]), kh, vh, positions, exponent_scale(scale), arithmetic)
        out[rows] = to_bf16(normalised(state, arithmetic)).transpose(0, 1)
        m[rows], lsum[rows] = state.m.T, state.lsum.T
    return out, m, lsum


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
    """The packed function over keys and values gathered page by page."""
    size, dim = kv_cache.shape[2], q.shape[2]
    checks.paged_values(q.shape[0], kv_cache.shape[0], size, block_table, seq_lens, query_start_loc)
    device, lengths = q.device, seq_lens.tolist()
    gathered, positions = [kv_cache[:0, :, 0]], [torch.arange(0, device=device)]
    starts = query_start_loc.tolist()
    for b, length in enumerate(lengths):
        j = torch.arange(length, device=device)
        gathered.append(kv_cache[block_table[b, j // size].long(), :, j % size])
        positions.append(torch.arange(length - (starts[b + 1] - starts[b]), length, device=device))
    pairs = torch.cat(gathered)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    k, v = pairs[..., :dim], pairs[..., dim:]
    result = forward(q, k, v, query_start_loc, ends, torch.cat(positions), scale, False, arithmetic)[0]
    return result if out is None else out.copy_(result)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Row by row into the slot's page."""
    size = kv_cache.shape[2]
    checks.slots(slot_mapping, kv_cache.shape[0] * size)
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_cache[slot // size, :, slot % size] = torch.cat([key[row], value[row]], dim=-1)


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
    """(dq, dk, dv) bf16; dk and dv are the part that comes from the given query rows."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    kv_heads, factor = k.shape[1], torch.tensor(scale, dtype=torch.float32, device=q.device)
    group = q.shape[1] // kv_heads
    delta = lane_dot(dout.float(), out.float(), LANES)
    inverse = 1.0 / lsum
    for rows, keys, positions in _sequences(cu_seqlens_q, cu_seqlens, q_positions):
        queries, douts, tops, sums, deltas = (_grouped(x[rows], kv_heads) for x in (q, dout, m, inverse, delta))
        kh, vh = _heads_first(k[keys]), _heads_first(v[keys])
        valid = torch.arange(kh.shape[1], device=q.device) <= positions.repeat_interleave(group)[:, None]
        scores = kh.new_zeros(kv_heads, queries.shape[1], kh.shape[1])
        s = chain(queries, kh.transpose(-1, -2), scores, None, arithmetic)
        p = probability(s, exponent_scale(scale), tops, sums, arithmetic)
        ds = p * (chain(douts, vh.transpose(-1, -2), scores, None, arithmetic) - deltas)
        p, ds = (torch.where(valid, to_bf16(x).float(), 0.0) for x in (p, ds))
        dqh = chain(ds, kh, torch.zeros_like(queries), valid, arithmetic) + 0.0
        dkh = chain(ds.transpose(-1, -2), queries, torch.zeros_like(kh), valid.T, arithmetic) + 0.0
        dvh = chain(p.transpose(-1, -2), douts, torch.zeros_like(vh), valid.T, arithmetic) + 0.0
        dq[rows] = _ungrouped(to_bf16(dqh * factor), group)
        dk[keys] = to_bf16(dkh * factor).transpose(0, 1)
        dv[keys] = to_bf16(dvh).transpose(0, 1)
    return dq, dk, dv


def probability(s: torch.Tensor, c: float, m: torch.Tensor, inverse: torch.Tensor, arithmetic: str) -> torch.Tensor:
    """P [H, n, L] of scores s, from m and 1 / l [H, n, 1] of the forward pass."""
    if arithmetic == "fma32":
        return exp2(s * c - m) * inverse
    return matrix_form.probability(s, c, m, inverse)


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[n, Hq, ..] -> fp32 [Hkv, n * group, D or 1]: row r is query row r // group, head r % group of its group."""
    x = x.float().reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, -1)
    return x.transpose(0, 1).reshape(kv_heads, -1, x.shape[-1])


def _ungrouped(x: torch.Tensor, group: int) -> torch.Tensor:
    kv_heads, rows, dim = x.shape
    return x.view(kv_heads, rows // group, group, dim).transpose(0, 1).reshape(-1, kv_heads * group, dim)
