"""A step's traces as one safetensors file: per side and point, the traced tokens and their digests.

`SIDE/LAYER.NAME/DTYPE/tokens`   int64 [n, 2]  number of the sequence, index in it
`SIDE/LAYER.NAME/DTYPE/digests`  int64 [n]     the 64 bits of each digest
`SIDE/LAYER.NAME/DTYPE/rows`     [n, width]    integers, where rows were kept
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from samebits.trace.points import Point
from samebits.trace.side import SideTrace, Token

_Array = np.ndarray[Any, Any]


def encode_traces(sides: Mapping[str, SideTrace]) -> bytes:
    """The file's bytes."""
    tensors: dict[str, _Array] = {}
    for side, trace in sides.items():
        for point, digests in trace.digests.items():
            start = f"{side}/{point}/{trace.dtypes[point]}"
            tokens = sorted(digests)
            tensors[f"{start}/tokens"] = np.array([(t.sequence, t.index) for t in tokens], dtype=np.int64).reshape(
                -1, 2
            )
            tensors[f"{start}/digests"] = np.array([digests[token] for token in tokens], dtype=np.uint64).view(np.int64)
            rows = trace.rows.get(point, {})
            if tokens and all(token in rows for token in tokens):
                tensors[f"{start}/rows"] = np.stack([rows[token] for token in tokens])
    return bytes(save(tensors))


def read_traces(path: Path) -> dict[str, SideTrace]:
    """What `encode_traces` wrote, by side. Raises ValueError for anything else, OSError."""
    sides: dict[str, SideTrace] = {}
    try:
        tensors = load(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path.name}: no readable trace: {error}") from error
    for name in tensors:
        side, at, dtype, kind = (*name.split("/"), "", "", "")[:4]
        layer, _, label = at.partition(".")
        if kind not in ("tokens", "digests", "rows") or not layer.lstrip("-").isdecimal():
            raise ValueError(f"{path.name}: {name!r} is no tensor of a trace")
        if kind != "tokens":
            continue
        trace, point = sides.setdefault(side, SideTrace()), Point(int(layer), label)
        start = name.removesuffix("tokens")
        places, digests, rows = (tensors.get(f"{start}{kind}") for kind in ("tokens", "digests", "rows"))
        if places is None or digests is None or not _fit(places, digests, rows):
            raise ValueError(f"{path.name}: {start}... are not the tokens and digests of a trace")
        tokens = [Token(*pair) for pair in places.tolist()]
        trace.dtypes[point] = dtype
        trace.digests[point] = dict(zip(tokens, digests.view(np.uint64).tolist(), strict=True))
        if rows is not None:
            trace.rows[point] = dict(zip(tokens, rows, strict=True))
    return sides


def _fit(places: _Array, digests: _Array, rows: _Array | None) -> bool:
    """Whether these are arrays of one point."""
    count = len(places)
    shapes = (places.shape, digests.shape) == ((count, 2), (count,)) and (rows is None or len(rows) == count)
    return shapes and {places.dtype, digests.dtype} == {np.dtype(np.int64)}
