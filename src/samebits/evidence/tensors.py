"""Reading a safetensors file with the standard library, trusting nothing in it.

The file is an 8-byte little-endian header length, a JSON header and one data buffer. Accepted only when the
header fits into the file and its limit, names are unique, sizes follow from dtype and shape, and the tensors
tile the buffer exactly: no gap, no overlap, nothing beyond the end.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.timeline.events import parse_json

MAX_HEADER = 16 << 20
_SIZES = {"U8": 1, "I8": 1, "BOOL": 1, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_SIZES |= {"F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8}
_CODES = {"U8": "B", "I8": "b", "BOOL": "B", "I16": "h", "U16": "H", "I32": "i", "U32": "I"}
_CODES |= {"F32": "f", "F64": "d", "I64": "q", "U64": "Q"}


@dataclass(frozen=True, kw_only=True)
class RawTensor:
    """One tensor as bytes: little-endian, C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def values(self) -> Sequence[Any]:
        """The elements in C order, as Python numbers."""
        return _decode(self.data, _CODES[self.dtype])

    def bits32(self) -> Sequence[int]:
        """The elements of a 4-byte tensor as unsigned bit patterns, whatever its dtype says they mean."""
        if _SIZES[self.dtype] != 4:
            raise ValueError(f"tensor {self.name!r} is {self.dtype}, want a 4-byte type")
        return _decode(self.data, "I")


def read_tensors(path: Path) -> dict[str, RawTensor]:
    """All tensors of one file. Raises ValueError naming what is malformed, OSError when it cannot be read."""
    content = path.read_bytes()
    if len(content) < 8:
        raise ValueError(f"{path.name}: {len(content)} bytes, too short for a safetensors header")
    length = int.from_bytes(content[:8], "little")
    if length > min(len(content) - 8, MAX_HEADER):
        raise ValueError(f"{path.name}: header of {length} bytes in a file of {len(content)}")
    try:
        header = parse_json(content[8 : 8 + length])
    except ValueError as error:
        raise ValueError(f"{path.name}: header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path.name}: header is not a JSON object")
    header.pop("__metadata__", None)
    buffer = memoryview(content)[8 + length :]
    spans = {name: _span(path.name, name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, _, begin, stop) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if begin != end:
            raise ValueError(f"{path.name}: tensor {name!r} starts at byte {begin}, want {end}: gap or overlap")
        end = stop
    if end != len(buffer):
        raise ValueError(f"{path.name}: tensors cover {end} bytes, the file holds {len(buffer)}")
    return {
        name: RawTensor(name=name, dtype=dtype, shape=shape, data=buffer[begin:stop])
        for name, (dtype, shape, begin, stop) in spans.items()
    }


def _span(file: str, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{file}: tensor {name!r} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in _SIZES:
        raise ValueError(f"{file}: tensor {name!r} has dtype {dtype!r}, known: {', '.join(_SIZES)}")
    if not _naturals(shape) or len(shape) > 8 or not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"{file}: tensor {name!r} has shape {shape!r} and offsets {offsets!r}")
    begin, stop = offsets
    if stop - begin != math.prod(shape) * _SIZES[dtype]:
        raise ValueError(f"{file}: tensor {name!r} spans {stop - begin} bytes, {dtype} {shape} needs another size")
    return dtype, tuple(shape), begin, stop


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _decode(data: memoryview, code: str) -> Sequence[Any]:
    values = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
