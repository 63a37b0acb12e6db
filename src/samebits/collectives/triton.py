"""Launches of the kernels that add partial sums of ranks, and their list for the audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from samebits.backends.device_counters import slot
from samebits.backends.launcher import bind, cdiv, launcher
from samebits.collectives import kernels

FOLD_BLOCK = 1024
# A block of the one-step form has few values, so that the first arrive soon; one of the two-step form moves much.
SMALL_TILE, SMALL_BLOCKS, SMALL_WARPS = 512, 128, 4
LARGE_TILE, LARGE_BLOCKS, LARGE_WARPS = 4096, 128, 16

Launch = Callable[..., None]
Form = Literal["shares", "own share", "direct"]


@dataclass(frozen=True)
class Addresses:
    """Where the parts of all ranks' regions are: int64 [ranks], on the device."""

    flags: Tensor
    small_boxes: Tensor
    large_boxes: Tensor


class Region:
    """What kernels know of the memory of all ranks, and their launches over it."""

    def __init__(
        self, rank: int, ranks: int, addresses: Addresses, watch: Tensor, small_room: int, large_room: int
    ) -> None:
        """Room for so many values of each rank; `watch` is what the host and waiting blocks share."""
        self.ranks, self.small_room, self.large_room = ranks, small_room, large_room
        device = addresses.flags.device
        # of each block: how many calls it has seen, and whether a rank did not come
        small_state = torch.zeros(SMALL_BLOCKS, 2, dtype=torch.int64, device=device)
        large_state = torch.zeros(LARGE_BLOCKS, 2, dtype=torch.int64, device=device)
        common = {"RANK": rank, "RANKS": ranks, "enable_fp_fusion": False}
        few = {**common, "TILE": SMALL_TILE, "BLOCKS": SMALL_BLOCKS, "ROOM": small_room, "num_warps": SMALL_WARPS}
        many = {**common, "TILE": LARGE_TILE, "BLOCKS": LARGE_BLOCKS, "ROOM": large_room, "num_warps": LARGE_WARPS}
        large = addresses.large_boxes, addresses.flags, large_state, watch
        self.small: dict[tuple[bool, torch.dtype], Launch] = {}
        self.large: dict[tuple[bool, bool, torch.dtype], Launch] = {}
        for bias, dtype in product((False, True), (torch.float32, torch.bfloat16)):
            finish = {"HAS_BIAS": bias, "OUT_BF16": dtype == torch.bfloat16}
            self.small[bias, dtype] = bind(
                kernels.sum_small, addresses.small_boxes, small_state, watch, slot("collectives.sum_small", device),
                **few, **finish,
            )  # fmt: skip
            counter = slot("collectives.sum_large", device)
            for whole in (False, True):
                self.large[whole, bias, dtype] = bind(kernels.sum_large, *large, counter, **many, **finish, WHOLE=whole)
        self.gather = bind(kernels.gather_words, *large, slot("collectives.gather", device), **many)


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
    """The tree sum of fp32 [n <= small_room] over ranks in one step, each value with a mark."""
    n = partial.numel()
    launch = region.small[bias is not None, out.dtype]
    launch((min(SMALL_BLOCKS, cdiv(n, SMALL_TILE)),), partial, bias, out, n, _columns(bias))


def sum_large(partial: Tensor, bias: Tensor | None, out: Tensor, region: Region, form: Form) -> None:
    """The tree sum of fp32 [n] over ranks through large boxes.

    "shares": each rank adds a share and sends its sums to all, which takes two steps. "own share": of [ranks, n] each
    rank adds its own row, `out`. "direct": each rank adds all [n <= large_room].
    """
    n = out.numel()
    share, tail = shares(n, region.ranks) if form == "shares" else (n, n)
    launch = region.large[form == "shares", bias is not None, out.dtype]
    grid = (min(LARGE_BLOCKS, cdiv(share, LARGE_TILE)),)
    launch(grid, partial, bias, out, share, tail, 0 if form == "direct" else share, _columns(bias))


def gather_words(words: Tensor, out: Tensor, region: Region) -> None:
    """int32 [n <= large_room] of every rank -> out [ranks, n]."""
    n = words.numel()
    region.gather((min(LARGE_BLOCKS, cdiv(n, LARGE_TILE)),), words, out, n)


def shares(n: int, ranks: int) -> tuple[int, int]:
    """How many of n values each rank but the last adds, and how many the last: shares begin at multiples of 16."""
    share = -(-n // (16 * ranks)) * 16
    return share, n - share * (ranks - 1)


def _columns(bias: Tensor | None) -> int:
    return 1 if bias is None else bias.numel()


_SUM = {"partial": "*fp32", "bias": "*bf16", "state": "*i64", "watch": "*i64", "counter": "*i64", "columns": "i32"}
_SMALL = {**_SUM, "out": "*bf16", "boxes": "*i64", "n": "i32"}
_LARGE = {**_SUM, "boxes": "*i64", "flags": "*i64", "share": "i32", "tail": "i32", "stride": "i32"}
_TILES = {"TILE": LARGE_TILE, "BLOCKS": LARGE_BLOCKS, "ROOM": 1 << 20}
KERNELS = [
    ("fold_stacked", kernels.fold_stacked,
     {"stacked": "*fp32", "bias": "*bf16", "out": "*bf16", "counter": "*i64", "n": "i32", "columns": "i32"},
     {"RANKS": 4, "HAS_BIAS": True, "OUT_BF16": True, "BLOCK": FOLD_BLOCK}, {"divisible": ("n", "columns")}),
    *((f"sum_small.{ranks}", kernels.sum_small, _SMALL,
       {"RANK": 1, "RANKS": ranks, "HAS_BIAS": True, "OUT_BF16": True, "TILE": SMALL_TILE, "BLOCKS": SMALL_BLOCKS,
        "ROOM": 1 << 18}, {"num_warps": SMALL_WARPS, "divisible": ("n", "columns")}) for ranks in (2, 8)),
    *((f"sum_large.{'bf16' if rounded else 'fp32'}", kernels.sum_large,
       {**_LARGE, "out": "*bf16" if rounded else "*fp32"},
       {"RANK": 0, "RANKS": 4, "WHOLE": True, "HAS_BIAS": True, "OUT_BF16": rounded, **_TILES},
       {"num_warps": LARGE_WARPS, "divisible": ("share", "tail", "stride", "columns")}) for rounded in (True, False)),
    ("gather_words", kernels.gather_words,
     {"words": "*i32", "out": "*i32", "boxes": "*i64", "flags": "*i64", "state": "*i64", "watch": "*i64",
      "counter": "*i64", "n": "i32"},
     {"RANK": 0, "RANKS": 2, **_TILES}, {"num_warps": LARGE_WARPS, "divisible": ("n",), "spills_allowed": ("sm_90",)}),
]  # fmt: skip
