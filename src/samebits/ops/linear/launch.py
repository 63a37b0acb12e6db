"""Which kernel and tile serve a shape: a function of the shape alone, so a launch can be printed and repeated.

`python -m samebits.ops.linear.launch M N K [SEGMENTS]` prints the choices. No choice here can change a bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

SMS = 132  # of an H100 or H200; other cards get the same launches
LDS_BYTES = 65536  # of a compute unit of MI300X


@dataclass(frozen=True)
class Launch:
    """`kernel`: persistent, tile, any (see kernels.py); `swapped`, `split` and `repeat` belong to `any`.

    `repeat`: rows past the last are loaded as the last, so that no load has a mask.
    """

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    per_sm: int = 1  # programs of the persistent kernel on each multiprocessor
    swapped: bool = False
    split: bool = False  # segments side by side, added up by a second kernel
    repeat: bool = False

    @property
    def name(self) -> str:
        marks = f"-x{self.per_sm}" * (self.per_sm > 1) + "-swapped" * self.swapped + "-split" * self.split
        marks += "-repeat" * self.repeat
        return f"{self.kernel}-{self.block_m}x{self.block_n}x{self.block_k}-w{self.warps}-s{self.stages}{marks}"


@lru_cache(maxsize=4096)
def launch(m: int, n: int, k: int, *, segments: int = 1, tma: bool = True, keep_c: bool = False) -> Launch:
    """The launch for c [m, n] = a [m, k] b [n, k]^T.

    `tma`: addresses and strides suit tensor descriptors; `keep_c`: the sums start from c.
    """
    if keep_c:
        return Launch("tile", 128, 256, 64, 8, 3) if tma else Launch("any", 64, 64, 32, 4, 3)
    if m <= 64:
        return _few_rows(m, n, segments, tma)
    if not tma or (segments > 1 and k // segments % 64):
        return Launch("any", 64, 64, 32, 4, 3, split=segments > 1)
    if segments > 1:
        return Launch("tile", 128, 128, 64, 8, 4)
    return _many_rows(m, n)


def _few_rows(m: int, n: int, segments: int, tma: bool) -> Launch:
    """As many tiles as there are multiprocessors, or a little fewer: the weights stream through once."""
    block_m = max(16, 1 << (m - 1).bit_length())
    if block_m == 64 and tma and segments == 1:
        return _sixty_four_rows(n)
    split = segments > 1
    n = n * segments
    if n > 16384 and tma and not split:
        return Launch("persistent", block_m, 64, 128, 4, 5)
    if n > 8192:
        return Launch("any", block_m, 64, 128, 4, 4, swapped=True, split=split)
    if n <= 16 * SMS and m < block_m == 16 and not split:
        return Launch("any", 16, 16, 512, 2, 4, swapped=True, repeat=True)
    if n <= 16 * SMS and (m == block_m or block_m == 64):
        return Launch("any", block_m, 16, 512 if block_m < 64 else 256, 4, 4, swapped=True, split=split)
    if block_m == 16:
        return Launch("any", block_m, 16, 256, 2, 5, swapped=True, split=split)
    return Launch("any", block_m, 32, 256, 4, 4, swapped=True, split=split)


def _sixty_four_rows(n: int) -> Launch:
    if n <= 16 * SMS:
        return Launch("persistent", 64, 16, 256, 4, 5)
    if n <= 32 * SMS:
        return Launch("persistent", 64, 32, 256, 4, 4)
    if n <= 64 * SMS or n > 128 * SMS:
        return Launch("persistent", 64, 64, 128, 4, 5)
    return Launch("persistent", 64, 128, 128, 4, 4)


# (block_m, block_n, block_k, warps, stages) and how fast a multiprocessor works through one, in units of the largest
_TILES = (
    ((128, 256, 64, 8, 4), 1.0),
    ((128, 128, 64, 8, 5), 0.85),
    ((128, 128, 64, 4, 4), 0.85),
    ((64, 128, 128, 4, 4), 0.78),
    ((64, 64, 128, 4, 6), 0.58),
    ((64, 32, 256, 4, 4), 0.42),
)


def _many_rows(m: int, n: int) -> Launch:
    """The tile with which the last wave of tiles ends first."""

    def time(entry: tuple[tuple[int, int, int, int, int], float]) -> float:
        (block_m, block_n, *_), speed = entry
        waves = -(-(-(-m // block_m) * -(-n // block_n)) // SMS)
        return waves * block_m * block_n / speed

    return Launch("persistent", *min(_TILES, key=time)[0])


def vendor_is_faster(m: int, n: int, k: int, segments: int = 1) -> bool:
    """Is the vendor's product, which needs a certificate, the faster one? Measured on an H200."""
    return segments == 1 and m > 64 and not (m >= 1024 and k >= 8192)


def vendor_plan(rows: Iterable[int], weights: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(m, n, k) of every product of `rows` with weights [n, k] for which a certificate is worth having."""
    sizes = [(m, n, k) for n, k in sorted(set(weights)) for m in sorted(set(rows))]
    return [size for size in sizes if vendor_is_faster(*size)]


def for_amd(how: Launch) -> Launch:
    """The same launch for AMD: tiles that the registers of a wave of 64 lanes and 64 KiB of LDS hold, one stage."""
    block_n, block_k = min(how.block_n, 128), how.block_k
    while 2 * (how.block_m + block_n) * block_k > LDS_BYTES // 2:
        block_k //= 2
    warps = 8 if how.block_m * block_n >= 128 * 128 else how.warps
    return replace(how, block_n=block_n, block_k=block_k, warps=warps, stages=2, per_sm=1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m samebits.ops.linear.launch", description=__doc__)
    for name in ("M", "N", "K"):
        parser.add_argument(name, type=int)
    parser.add_argument("SEGMENTS", type=int, nargs="?", default=1)
    asked = parser.parse_args()
    print(launch(asked.M, asked.N, asked.K, segments=asked.SEGMENTS))
    print("the vendor's product, where certified:", vendor_is_faster(asked.M, asked.N, asked.K, asked.SEGMENTS))


if __name__ == "__main__":
    main()
