"""Launches of the kernels that add partial sums of ranks, and their list for the audit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher
from samebits.collectives import kernels

FOLD_BLOCK = 1024
# A block of the one-step form has few values, so that the first arrive soon; one of the two-step form moves much.
SMALL_TILE, SMALL_BLOCKS = 512, 128
LARGE_TILE, LARGE_BLOCKS = 4096, 128


class Region(NamedTuple):
    """What kernels know of the memory of all ranks: tables of addresses, int64 [ranks], and sizes.

    The states count generations, int64 [blocks, 2]; `watch` is what the host and waiting blocks share.
    """

    rank: int
    ranks: int
    small_boxes: Tensor
    large_boxes: Tensor
    flags: Tensor
    small_state: Tensor
    large_state: Tensor
    watch: Tensor
    small_room: int
    large_room: int


def fold(stacked: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """fp32 [ranks, n] -> [n]: the balanced tree over rows, plus `bias` (repeated over n), rounded once to `dtype`."""
    ranks, n = stacked.shape
    out = torch.empty(n, dtype=dtype, device=stacked.device)
    if n:
        launcher(kernels.fold_stacked)[(cdiv(n, FOLD_BLOCK),)](
            stacked, bias, out, slot("collectives.fold", stacked.device), n, _columns(bias), RANKS=ranks,
            HAS_BIAS=bias is not None, OUT_BF16=dtype == torch.bfloat16, BLOCK=FOLD_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def sum_small(partial: Tensor, bias: Tensor | None, out: Tensor, region: Region) -> None:
    """The tree sum of fp32 [n <= small_room] over ranks in one step."""
    n = partial.numel()
    launcher(kernels.sum_small)[(min(SMALL_BLOCKS, cdiv(n, SMALL_TILE)),)](
        partial, bias, out, region.small_boxes, region.small_state, region.watch,
        slot("collectives.sum_small", partial.device), n, _columns(bias), RANK=region.rank, RANKS=region.ranks,
        HAS_BIAS=bias is not None, OUT_BF16=out.dtype == torch.bfloat16, TILE=SMALL_TILE, BLOCKS=SMALL_BLOCKS,
        ROOM=region.small_room, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def sum_large(partial: Tensor, bias: Tensor | None, out: Tensor, region: Region, whole: bool) -> None:
    """The tree sum of fp32 [n] over ranks in two steps; without `whole` only this rank's share of equal ones."""
    share, tail = shares(partial.numel(), region.ranks) if whole else (out.numel(), out.numel())
    launcher(kernels.sum_large)[(min(LARGE_BLOCKS, cdiv(share, LARGE_TILE)),)](
        partial, bias, out, region.large_boxes, region.flags, region.large_state, region.watch,
        slot("collectives.sum_large", partial.device), share, tail, _columns(bias), RANK=region.rank,
        RANKS=region.ranks, WHOLE=whole, HAS_BIAS=bias is not None, OUT_BF16=out.dtype == torch.bfloat16,
        TILE=LARGE_TILE, BLOCKS=LARGE_BLOCKS, ROOM=region.large_room, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip


def gather_words(words: Tensor, out: Tensor, region: Region) -> None:
    """int32 [n <= large_room] of every rank -> out [ranks, n]."""
    n = words.numel()
    launcher(kernels.gather_words)[(min(LARGE_BLOCKS, cdiv(n, LARGE_TILE)),)](
        words, out, region.large_boxes, region.flags, region.large_state, region.watch,
        slot("collectives.gather", words.device), n, RANK=region.rank, RANKS=region.ranks, TILE=LARGE_TILE,
        BLOCKS=LARGE_BLOCKS, ROOM=region.large_room, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip


def shares(n: int, ranks: int) -> tuple[int, int]:
    """How many of n values each rank but the last adds, and how many the last: shares begin at multiples of 16."""
    share = -(-n // (16 * ranks)) * 16
    return share, n - share * (ranks - 1)


def _columns(bias: Tensor | None) -> int:
    return 1 if bias is None else bias.numel()


_SUM = {"partial": "*fp32", "bias": "*bf16", "state": "*i64", "watch": "*i64", "counter": "*i64", "columns": "i32"}
_SMALL = {**_SUM, "out": "*bf16", "boxes": "*i64", "n": "i32"}
_LARGE = {**_SUM, "boxes": "*i64", "flags": "*i64", "share": "i32", "tail": "i32"}
_TILES = {"TILE": LARGE_TILE, "BLOCKS": LARGE_BLOCKS, "ROOM": 1 << 20}
KERNELS = [
    ("fold_stacked", kernels.fold_stacked,
     {"stacked": "*fp32", "bias": "*bf16", "out": "*bf16", "counter": "*i64", "n": "i32", "columns": "i32"},
     {"RANKS": 4, "HAS_BIAS": True, "OUT_BF16": True, "BLOCK": FOLD_BLOCK}, {"divisible": ("n", "columns")}),
    *((f"sum_small.{ranks}", kernels.sum_small, _SMALL,
       {"RANK": 1, "RANKS": ranks, "HAS_BIAS": True, "OUT_BF16": True, "TILE": SMALL_TILE, "BLOCKS": SMALL_BLOCKS,
        "ROOM": 1 << 18}, {"num_warps": 4, "divisible": ("n", "columns")}) for ranks in (2, 8)),
    *((f"sum_large.{'bf16' if rounded else 'fp32'}", kernels.sum_large,
       {**_LARGE, "out": "*bf16" if rounded else "*fp32"},
       {"RANK": 0, "RANKS": 4, "WHOLE": True, "HAS_BIAS": True, "OUT_BF16": rounded, **_TILES},
       {"num_warps": 16, "divisible": ("share", "tail", "columns")}) for rounded in (True, False)),
    ("gather_words", kernels.gather_words,
     {"words": "*i32", "out": "*i32", "boxes": "*i64", "flags": "*i64", "state": "*i64", "watch": "*i64",
      "counter": "*i64", "n": "i32"},
     {"RANK": 0, "RANKS": 2, **_TILES}, {"num_warps": 16, "divisible": ("n",), "spills_allowed": ("sm_90",)}),
]  # fmt: skip
