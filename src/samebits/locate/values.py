"""Two rows of values side by side: which elements differ, by how many steps between floats, in which bits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int64": torch.int64, "float16": torch.float16}
_EDGES = (1, 2, 4, 16, 256, 65536)
_FRACTION_BELOW_BF16 = 0xFFFF


@dataclass(frozen=True, kw_only=True)
class ElementDifference:
    """The element at which two rows first differ, and the one at which they differ most, in steps (ULP)."""

    column: int
    left: str
    right: str
    ulps: int | None


@dataclass(frozen=True, kw_only=True)
class RowDifference:
    """`count` of `total` elements differ, finite ones by `max_abs` at most (None: there is none).

    `histogram` counts them by steps: `=1`, `2-3`, ..., `not a number`.
    """

    point: str
    dtype: str
    count: int
    total: int
    first: ElementDifference
    worst: ElementDifference
    max_abs: float | None
    histogram: dict[str, int]


def tensor_of(bits: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    """A row of integers as the values that they are the bits of. Raises ValueError for an unknown dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"trace: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return torch.from_numpy(np.ascontiguousarray(bits)).view(DTYPES[dtype])


def compare_rows(
    point: str, dtype: str, left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]
) -> RowDifference | None:
    """None where the rows are the same bits. Both hold the bits of `dtype` as signed integers."""
    columns = np.flatnonzero(left != right)
    if not len(columns):
        return None
    a, b = tensor_of(left[columns], dtype).double(), tensor_of(right[columns], dtype).double()
    nan = (torch.isnan(a) | torch.isnan(b)).numpy()
    steps = np.abs(_ordered(left[columns]) - _ordered(right[columns]))
    worst = int(np.argmax(np.where(nan, np.iinfo(np.int64).max, steps)))
    gaps = (a - b).abs()
    finite = gaps[torch.isfinite(gaps)]

    def element(at: int) -> ElementDifference:
        column = int(columns[at])
        return ElementDifference(
            column=column,
            left=show(left[column], dtype),
            right=show(right[column], dtype),
            ulps=None if nan[at] else int(steps[at]),
        )

    return RowDifference(
        point=point,
        dtype=dtype,
        count=len(columns),
        total=len(left),
        first=element(0),
        worst=element(worst),
        max_abs=float(finite.max()) if len(finite) else None,
        histogram=_histogram(steps, nan),
    )


def _ordered(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Integers in the order of the floats whose bits they are: neighbours differ by 1, -0 and +0 by 1 as well."""
    lowest = -(1 << (8 * bits.dtype.itemsize - 1))
    wide = bits.astype(np.int64)
    return np.where(wide < 0, lowest - wide - 1, wide)


def _histogram(steps: np.ndarray[Any, Any], nan: np.ndarray[Any, Any]) -> dict[str, int]:
    labels = [_label(int(step)) for step in steps[~nan]] + ["not a number"] * int(nan.sum())
    order = [_label(edge) for edge in _EDGES] + ["not a number"]
    counts = Counter(labels)
    return {label: counts[label] for label in order if counts[label]}


def _label(step: int) -> str:
    for low, high in zip(_EDGES, (*_EDGES[1:], 0), strict=True):
        if high == 0:
            return f">={low}"
        if step < high:
            return f"={low}" if high == low + 1 else f"{low}-{high - 1}"
    return ""


def show(bits: int, dtype: str) -> str:
    """A value and its bits: `1.5 (0x3fc0)`."""
    size = np.dtype(type(bits)).itemsize if isinstance(bits, np.generic) else DTYPES[dtype].itemsize
    value = tensor_of(np.array([bits], dtype=f"int{8 * size}"), dtype)[0].item()
    return f"{value:.9g} (0x{int(bits) & ((1 << (8 * size)) - 1):0{2 * size}x})"


def are_bf16_values(bits: np.ndarray[Any, Any]) -> bool:
    """Whether every fp32 value of the row is one that bfloat16 holds: it was rounded to that somewhere."""
    return bits.dtype.itemsize == 4 and not np.any(bits & _FRACTION_BELOW_BF16)
