"""Where the token at (sample, position) sits, per context-parallel layout, and back. Pure functions of lengths.

One map serves tokens, targets, masks and values alike. The row of position p predicts the token at p + 1, so the
response rows of a sample are the positions prompt - 1 .. length - 2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from samebits.linear_logp.types import TokenLayout, TokenLayoutKind


@dataclass(frozen=True)
class TokenMap:
    """Packed samples of these `lengths` over `ranks` ranks; rows per rank are a multiple of `multiple`."""

    kind: TokenLayoutKind
    ranks: int
    lengths: tuple[int, ...]
    multiple: int = 1

    def __post_init__(self) -> None:
        TokenLayout(self.ranks, 0, self.kind)
        if self.multiple < 1 or any(length < 1 for length in self.lengths):
            raise ValueError(f"TokenMap: lengths {self.lengths} and multiple {self.multiple} must be at least 1")

    @property
    def rows(self) -> int:
        """T: rows of every rank, padding included."""
        ranks = self.ranks if self.kind == "allgather" else 1
        return -(-sum(self._spans()) // (ranks * self.multiple)) * self.multiple

    def place(self, sample: int, position: int) -> tuple[int, int]:
        """(rank, row) of one token. Raises ValueError for a position outside its sample."""
        length = self.lengths[sample]
        if not 0 <= position < length:
            raise ValueError(f"sample {sample} has positions 0 to {length - 1}, got {position}")
        start = sum(self._spans()[:sample])
        if self.kind == "single":
            return 0, start + position
        if self.kind == "allgather":
            return divmod(start + position, self.rows)
        chunk = self._chunk(length)
        part, offset = divmod(position, chunk)
        if part < self.ranks:
            return part, start + offset
        return 2 * self.ranks - 1 - part, start + chunk + offset

    def token_at(self, rank: int, row: int) -> tuple[int, int] | None:
        """(sample, position) in a row of a rank; None for padding."""
        starts = [0, *accumulate(self._spans())]
        place = rank * self.rows + row if self.kind == "allgather" else row
        if place >= starts[-1]:
            return None
        sample = bisect_right(starts, place) - 1
        position = place - starts[sample]
        if self.kind == "zigzag":
            chunk = self._chunk(self.lengths[sample])
            half, offset = divmod(position, chunk)
            position = (rank if half == 0 else 2 * self.ranks - 1 - rank) * chunk + offset
        return (sample, position) if position < self.lengths[sample] else None

    def response_rows(self, rank: int, prompt_lengths: Sequence[int]) -> list[tuple[int, int, int]]:
        """(row, sample, response position) of every row of a rank that predicts a response token, by row."""
        found = []
        for row in range(self.rows):
            token = self.token_at(rank, row)
            if token is not None and prompt_lengths[token[0]] - 1 <= token[1] < self.lengths[token[0]] - 1:
                found.append((row, token[0], token[1] + 1 - prompt_lengths[token[0]]))
        return found

    def cumulative_lengths(self) -> list[int]:
        """Of the packed samples over all ranks, the padding behind them as one more sample."""
        ends = [0, *accumulate(self._spans())]
        whole = self.rows * (self.ranks if self.kind == "allgather" else 1)
        if whole > ends[-1]:
            ends.append(whole)
        return [end * self.ranks for end in ends] if self.kind == "zigzag" else ends

    def _chunk(self, length: int) -> int:
        return -(-length // (2 * self.ranks))

    def _spans(self) -> list[int]:
        """Rows that each sample takes where it is packed."""
        if self.kind == "zigzag":
            return [2 * self._chunk(length) for length in self.lengths]
        return list(self.lengths)
