"""The Triton kernels, on tensors of a CUDA or HIP device.

The LM head is computed in blocks of tokens and chunks of columns: while the matrix units make the logits of one
chunk, the vector units of the same multiprocessors turn those of the chunk before into integers (or into the
gradient), on a second stream. Block and chunk are free: neither can be seen in the bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher, next_power_of_2
from samebits.ops.linear import triton as linear
from samebits.ops.linear.launch import SMS, Launch
from samebits.ops.logprob import kernels
from samebits.ops.logprob.contract import EMPTY_TOP
from samebits.ops.logprob.registry import KERNELS as KERNELS
from samebits.ops.logprob.rows import NO_TARGET, Temperature, temperature_at

BLOCK, WARPS = 512, 1  # of a row, for one program
BESIDE = 8  # programs of vector work beside one of matrix work on a multiprocessor
TOKENS = 8192  # in one block
COLUMNS = 33 * 256  # in one chunk of a full block: tiles of 128 x 256 then fill 132 multiprocessors evenly
# leaves shared memory and registers for vector work on the same multiprocessor
LOGITS = Launch("persistent", 128, 256, 64, 8, 3)


def state(logits: Tensor, temperature: Temperature) -> Tensor:
    """int64 [T, 5]."""
    rows, columns = logits.shape
    splits = _splits(rows, columns)
    parts = torch.empty(rows, splits, 5, dtype=torch.int64, device=logits.device)
    _row_states(logits, temperature, parts, splits)
    return parts[:, 0] if splits == 1 else _merged(parts, torch.empty_like(parts[:, 0]))


def lse(states: Tensor) -> Tensor:
    """States [T, 5] -> fp32 [T]."""
    rows = states.shape[0]
    out = torch.empty(rows, dtype=torch.float32, device=states.device)
    if rows:
        counter = slot("logprob.lse", out.device)
        launcher(kernels.finish_lse)[(cdiv(rows, 128),)](states, out, counter, rows, BLOCK=128, enable_fp_fusion=False)
    return out


def finish(states: Tensor, z: Tensor) -> Tensor:
    """States [T, 5] and scaled target logits z [T, N] -> logp fp32 [T, N]."""
    out = torch.empty_like(z)
    _finish(states, out, z=z)
    return out


def logprob(logits: Tensor, targets: Tensor, temperature: Temperature) -> Tensor:
    """Logits [T, V], targets [T, N] -> fp32 [T, N]; +0 where a target is no column."""
    out = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    _finish(state(logits, temperature), out, logits=logits, targets=targets, temperature=temperature)
    return out


def linear_state(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Temperature, arithmetic: str
) -> Tensor:
    """int64 [T, 6]: the state of hidden @ weight^T, then the fp32 bits of the target's z, or NO_TARGET."""
    out = _no_states(hidden.shape[0], hidden.device)
    if weight.shape[0] == 0:
        return out
    for rows in _cuts(hidden.shape[0], TOKENS):
        warmth = temperature_at(temperature, rows)
        _block_state(hidden[rows], weight, bias, targets[rows], warmth, arithmetic, out[rows])
    return out


def _no_states(rows: int, device: torch.device) -> Tensor:
    """int64 [rows, 6]: states of no terms, which hold no target."""
    out = torch.empty(rows, 6, dtype=torch.int64, device=device)
    out[:, 0], out[:, 1:5], out[:, 5] = EMPTY_TOP, 0, NO_TARGET
    return out


def _block_state(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Temperature,
    arithmetic: str,
    out: Tensor,
) -> None:
    chunks = chunks_of(hidden, weight)
    parts = torch.empty(hidden.shape[0], len(chunks), 5, dtype=torch.int64, device=hidden.device)
    both = _Both(hidden, weight)
    for number, columns in enumerate(chunks):
        logits = both.buffer(number, columns)
        both.matrix_waits(number)
        chunk_logits(hidden, weight, bias, columns, logits, arithmetic)
        with both.vector_work(number):
            _row_states(logits, temperature, parts, 1, number, (targets, out, columns.start))
    both.join()
    _merged(parts, out)


def picked_state(logits: Tensor, targets: Tensor, temperature: Temperature) -> Tensor:
    """int64 [T, 6]: the state of logits [T, V], then the fp32 bits of the target's z, or NO_TARGET."""
    rows, out = len(logits), _no_states(len(logits), logits.device)
    parts = torch.empty(rows, 1, 5, dtype=torch.int64, device=logits.device)
    _row_states(logits, temperature, parts, 1, pick=(targets, out, 0))
    return _merged(parts, out)


def linear_backward(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Temperature,
    lse: Tensor,
    dw: Tensor | None,
    dbias: Tensor | None,
    arithmetic: str,
) -> Tensor:
    """fp32 dhidden [T, H], a sum over columns; dw [V, H] and dbias [V] (fp32) go on token by token."""
    dhidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    if weight.shape[0]:
        for rows in _cuts(hidden.shape[0], TOKENS):
            given = (upstream[rows], hidden[rows], targets[rows], temperature_at(temperature, rows), lse[rows])
            _block_backward(*given, weight, bias, dhidden[rows], dw, dbias, arithmetic)
    return dhidden


def _block_backward(
    upstream: Tensor,
    hidden: Tensor,
    targets: Tensor,
    temperature: Temperature,
    lse: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dhidden: Tensor,
    dw: Tensor | None,
    dbias: Tensor | None,
    arithmetic: str,
) -> None:
    chunks = chunks_of(hidden, weight)
    both = _Both(hidden, weight)
    gradients = [torch.empty_like(buffer, dtype=torch.bfloat16) for buffer in both.buffers]

    def products(number: int) -> None:
        columns = chunks[number]
        dz = gradients[number % 2][:, : columns.stop - columns.start]
        both.matrix_waits(number + 2)
        linear.matmul(dz, weight[columns].t(), dhidden, arithmetic, keep_c=True, name="logprob.dhidden")
        if dw is not None:
            linear.matmul(dz.t(), hidden.t(), dw[columns], arithmetic, keep_c=True, name="logprob.dweight")
        if dbias is not None:
            linear.bias_grad(dz, dbias[columns])

    for number, columns in enumerate(chunks):
        logits = both.buffer(number, columns)
        chunk_logits(hidden, weight, bias, columns, logits, arithmetic)
        # its buffer of gradients is free: the products of two chunks ago are in this stream before the logits
        with both.vector_work(number):
            dz = gradients[number % 2][:, : columns.stop - columns.start]
            logit_gradient(logits, upstream, lse, targets, temperature, dz, columns.start)
        if number > 0:
            products(number - 1)
    products(len(chunks) - 1)


class _Both:
    """Two buffers of logits; the caller's stream for matrix work and another one for vector work on them."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        rows, columns, device = hidden.shape[0], _chunk(hidden, weight), hidden.device
        self.buffers = [torch.empty(rows, columns, dtype=torch.float32, device=device) for _ in range(2)]
        self._main, self._side = torch.cuda.current_stream(device), _side_stream(device)
        self._used = [torch.cuda.Event(), torch.cuda.Event()]

    def buffer(self, number: int, columns: slice) -> Tensor:
        return self.buffers[number % 2][:, : columns.stop - columns.start]

    def matrix_waits(self, number: int) -> None:
        """The caller's stream waits for the vector work of chunk number - 2."""
        if number >= 2:
            self._main.wait_event(self._used[number % 2])

    @contextmanager
    def vector_work(self, number: int) -> Iterator[None]:
        """What is launched inside runs beside the matrix work that follows."""
        self._side.wait_stream(self._main)
        with torch.cuda.stream(self._side):
            yield
            self._used[number % 2].record(self._side)

    def join(self) -> None:
        self._main.wait_stream(self._side)


@lru_cache(maxsize=16)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def chunks_of(hidden: Tensor, weight: Tensor) -> list[slice]:
    """The columns in chunks whose logits for these rows, TOKENS at most, fit in little memory."""
    return _cuts(weight.shape[0], _chunk(hidden, weight))


def chunk_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice, out: Tensor, arithmetic: str
) -> None:
    """out fp32 [T, chunk] = the logits of one chunk of columns."""
    part = None if bias is None else bias[columns]
    suits = hidden.shape[0] >= 1024 and linear.suits_tma(hidden, weight, out)
    how = LOGITS if suits and arithmetic != "fma32" else None
    linear.matmul(hidden, weight[columns], out, arithmetic, bias=part, name="logprob.logits", how=how)


def _row_states(
    logits: Tensor,
    temperature: Temperature,
    parts: Tensor,
    splits: int,
    first: int = 0,
    pick: tuple[Tensor, Tensor, int] | None = None,
) -> None:
    """parts [T, all, 5] from `first` on; `pick`: (targets, where their z goes [T, 6], the first column's number)."""
    rows, columns = logits.shape
    if rows == 0:
        return
    targets, picked, first_column = pick or (None, None, 0)
    programs = rows * splits if pick is None else min(rows, _beside(logits.device))
    launcher(kernels.row_states)[(programs,)](
        logits, *_temperatures(temperature), targets, picked, parts, slot("logprob.states", logits.device),
        rows, columns, logits.stride(0), cdiv(columns, splits), splits, first_column, first, parts.shape[1],
        PER_ROW=isinstance(temperature, Tensor), DIVIDE=_divides(temperature), PICK=pick is not None,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _merged(parts: Tensor, out: Tensor) -> Tensor:
    rows, splits = parts.shape[:2]
    if rows:
        launcher(kernels.merge_states)[(rows,)](
            parts, out, slot("logprob.merge", out.device), splits, out.stride(0),
            BLOCK=next_power_of_2(splits), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _finish(
    states: Tensor,
    out: Tensor,
    z: Tensor | None = None,
    logits: Tensor | None = None,
    targets: Tensor | None = None,
    temperature: Temperature = 1.0,
) -> None:
    if out.numel() == 0:
        return
    columns, stride = (0, 0) if logits is None else (logits.shape[1], logits.stride(0))
    launcher(kernels.finish_logp)[(cdiv(out.numel(), 128),)](
        states, z, logits, targets, *_temperatures(temperature), out, slot("logprob.finish", out.device),
        out.numel(), out.shape[1], columns, stride,
        GIVEN=z is not None, PER_ROW=isinstance(temperature, Tensor), DIVIDE=_divides(temperature),
        BLOCK=128, enable_fp_fusion=False,
    )  # fmt: skip


def logit_gradient(
    logits: Tensor, upstream: Tensor, lse: Tensor, targets: Tensor, temperature: Temperature, dz: Tensor, first: int
) -> None:
    """dz bf16 [T, V] of logits [T, V], whose columns are those from `first` on of what `targets` count."""
    rows, columns = logits.shape
    programs = min(rows * cdiv(columns, BLOCK), _beside(logits.device))
    launcher(kernels.logit_gradient)[(programs,)](
        logits, upstream, lse, targets, *_temperatures(temperature), dz, slot("logprob.dlogits", dz.device),
        rows, columns, logits.stride(0), dz.stride(0), first,
        PER_ROW=isinstance(temperature, Tensor), DIVIDE=_divides(temperature), BLOCK=BLOCK,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _chunk(hidden: Tensor, weight: Tensor) -> int:
    """Columns of one chunk: fewer tokens leave room for more columns, up to four times COLUMNS."""
    return min(COLUMNS * min(4, max(1, TOKENS // max(hidden.shape[0], 1))), weight.shape[0])


def _cuts(length: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, length)) for at in range(0, length, step)]


def _temperatures(temperature: Temperature) -> tuple[Tensor | None, float]:
    return (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)


def _divides(temperature: Temperature) -> bool:
    return isinstance(temperature, Tensor) or temperature != 1.0


def _splits(rows: int, columns: int) -> int:
    """How many programs share a row: enough of them for all multiprocessors, each with a block or more."""
    return max(1, min(cdiv(columns, 4 * BLOCK), cdiv(16 * SMS, max(rows, 1))))


def _beside(device: torch.device) -> int:
    """Programs of vector work that leave room for one program of matrix work on each multiprocessor."""
    return BESIDE * torch.cuda.get_device_properties(device).multi_processor_count
