"""The LM head over the kept columns of each row, on a CUDA or HIP device.

Every logit is made, chunk by chunk, and the kept ones are picked: a logit has the same bits whatever is computed beside
it. The gradients' sums know kept columns alone, so a kernel gathers their factors.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.arithmetic.triton import count_launch
from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher
from samebits.ops.linear import triton as linear
from samebits.ops.linear.kernels import rounded
from samebits.ops.logprob import triton as logprob
from samebits.ops.logprob.rows import Temperature, temperature_at
from samebits.ops.sample_support.rows import Kept

PLACES = 1 << 23  # of one block of rows, for each as many as the longest has ids: bounds the memory of a call
BLOCK = 128  # of the hidden size, for one program
SIDE = 16  # rows of a product, of which one is wanted


@triton.jit
def gathered_sums(
    factors,
    index,
    starts,
    where,
    matrix,
    out,
    counter,
    depth,
    SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    """Row where[s] of out [.., depth] fp32 goes on with factors[t] times row index[t] of matrix [.., depth], for t
    ascending in [starts[s], starts[s + 1]).

    A step takes STEP terms, filled with zeros up to WIDTH, through the matrix unit; with WIDTH 1 it is one fused
    multiply-add.
    """
    count_launch(counter)
    sum_number = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, WIDTH)
    place = out + tl.load(where + sum_number) * depth + at[None, :] + tl.zeros((SIDE, 1), tl.int32)
    wanted = (tl.arange(0, SIDE) == 0)[:, None] & (at < depth)[None, :]
    acc = tl.load(place, mask=wanted, other=0.0)
    end = tl.load(starts + sum_number + 1)
    for first in range(tl.load(starts + sum_number), end, STEP):
        term = first + lane
        held = (term < end) & (lane < STEP)
        left = tl.broadcast_to(tl.load(factors + term, mask=held, other=0.0)[None, :], (SIDE, WIDTH))
        source = matrix + tl.load(index + term, mask=held, other=0)[:, None] * depth + at[None, :]
        right = tl.load(source, mask=held[:, None] & (at < depth)[None, :], other=0.0)
        if WIDTH == 1:
            acc = tl.fma(tl.broadcast_to(left.to(tl.float32), (SIDE, BLOCK)), right.to(tl.float32), acc)
        else:
            acc = tl.dot(left, right, acc)
    tl.store(place, rounded(acc, False), mask=wanted)


@dataclass(frozen=True)
class _Block:
    """Some rows of a call. `ids` int64 [rows, longest] holds row after row its ids; `held` says where there is one."""

    rows: slice
    ids: Tensor
    held: Tensor

    def places(self, targets: Tensor) -> Tensor:
        """int64 [rows]: where each row holds its target, -1 where it does not."""
        found = self.held & (self.ids == targets[self.rows, None])
        return torch.where(found.any(1), found.int().argmax(1), -1)


def _blocks(kept: Kept) -> Iterator[_Block]:
    rows = len(kept.counts)
    longest = max(1, int(kept.counts.max())) if rows else 1
    size = max(1, min(logprob.TOKENS, PLACES // longest))
    offsets = kept.offsets.tolist()
    for first in range(0, rows, size):
        here = slice(first, min(first + size, rows))
        held = torch.arange(longest, device=kept.ids.device) < kept.counts[here, None]
        ids = torch.zeros(held.shape, dtype=torch.int64, device=held.device)
        yield _Block(here, ids.masked_scatter_(held, kept.ids[offsets[here.start] : offsets[here.stop]]), held)


def kept_state(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Temperature,
    kept: Kept,
    arithmetic: str,
) -> Tensor:
    """As the definition."""
    out = torch.empty(len(hidden), 6, dtype=torch.int64, device=hidden.device)
    for block in _blocks(kept):
        logits = _logits(hidden, weight, bias, block, arithmetic)
        # a -inf where nothing is held adds nothing to a row with a finite logit, and others have no log-sum-exp
        out[block.rows] = logprob.picked_state(logits, block.places(targets), temperature_at(temperature, block.rows))
    return out


def kept_backward(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Temperature,
    kept: Kept,
    lse: Tensor,
    dw: Tensor | None,
    dbias: Tensor | None,
    arithmetic: str,
) -> Tensor:
    """As the definition."""
    dhidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for block in _blocks(kept):
        rows, logits = block.rows, _logits(hidden, weight, bias, block, arithmetic)
        dz = torch.empty(logits.shape, dtype=torch.bfloat16, device=logits.device)
        given = (upstream[rows], lse[rows], block.places(targets), temperature_at(temperature, rows))
        logprob.logit_gradient(logits, *given, dz, 0)
        owners, ids, factors = block.held.nonzero()[:, 0], block.ids[block.held], dz[block.held]
        _sums("dhidden", factors, ids, owners, weight, dhidden[rows], arithmetic)
        # an id's rows stay in their order
        ids, order = ids.sort(stable=True)
        owners, factors = owners[order], factors[order]
        if dw is not None:
            _sums("dweight", factors, owners, ids, hidden[rows], dw, arithmetic, together=1)
        if dbias is not None:
            ones = torch.ones(1, 1, dtype=torch.bfloat16, device=dbias.device)
            _sums("dbias", factors, torch.zeros_like(owners), ids, ones, dbias[:, None], "fma32")
    return dhidden


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: _Block, arithmetic: str) -> Tensor:
    """fp32, shaped like the block: the logits of its ids, -inf where there is none."""
    rows, ids = hidden[block.rows], block.ids
    out = torch.full(ids.shape, -torch.inf, device=hidden.device)
    for columns in logprob.chunks_of(rows, weight):
        chunk = torch.empty(len(rows), columns.stop - columns.start, dtype=torch.float32, device=hidden.device)
        logprob.chunk_logits(rows, weight, bias, columns, chunk, arithmetic)
        here = block.held & (ids >= columns.start) & (ids < columns.stop)
        out = torch.where(here, chunk.gather(1, (ids - columns.start).clamp(0, chunk.shape[1] - 1)), out)
    return out


def _sums(
    name: str,
    factors: Tensor,
    index: Tensor,
    where: Tensor,
    matrix: Tensor,
    out: Tensor,
    arithmetic: str,
    together: int = 2 * SIDE,
) -> None:
    """Row where[t] of out goes on with factors[t] times row index[t] of matrix; equal values of `where` are adjacent.

    `together`: how many terms of a sum a step of the matrix unit may take.
    """
    if not len(factors):
        return
    where, counts = torch.unique_consecutive(where, return_counts=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    side, width, step = (1, 1, 1) if arithmetic == "fma32" else (SIDE, max(SIDE, together), together)
    launcher(gathered_sums)[(len(where), cdiv(out.shape[1], BLOCK))](
        factors, index, starts, where, matrix, out, slot(f"kept_linear_logp.{name}", out.device), out.shape[1],
        SIDE=side, BLOCK=BLOCK, WIDTH=width, STEP=step, num_warps=4, **linear.OPTIONS,
    )  # fmt: skip


def _entry(name: str, side: int, width: int, step: int) -> tuple[object, ...]:
    types = {"factors": "*bf16", "index": "*i64", "starts": "*i64", "where": "*i64", "matrix": "*bf16", "out": "*fp32"}
    constants = {"SIDE": side, "BLOCK": BLOCK, "WIDTH": width, "STEP": step}
    options: dict[str, object] = {"num_warps": 4, "divisible": ("depth",)}
    return name, gathered_sums, types | {"counter": "*i64", "depth": "i32"}, constants, options


KERNELS = (
    _entry("gathered_sums", SIDE, 2 * SIDE, 2 * SIDE),
    _entry("gathered_sums-one-by-one", SIDE, SIDE, 1),
    _entry("gathered_sums-fma", 1, 1, 1),
)
