"""Every token of every small case has one place, and every place its token."""

from __future__ import annotations

from itertools import product

import pytest

from samebits.linear_logp import TokenLayout
from samebits.linear_logp.layouts import TokenMap
from samebits.linear_logp.types import TokenLayoutKind

CASES = [
    TokenMap(kind, ranks, lengths, multiple)
    for kind, ranks in (("single", 1), ("zigzag", 2), ("zigzag", 3), ("zigzag", 4), ("allgather", 2), ("allgather", 4))
    for lengths in [(n,) for n in range(1, 14)] + list(product((1, 2, 5, 11), repeat=3))
    for multiple in (1, 4)
]  # fmt: skip
KINDS: list[TokenLayoutKind] = ["single", "zigzag", "allgather"]


def tokens(case: TokenMap) -> list[tuple[int, int]]:
    return [(sample, position) for sample, length in enumerate(case.lengths) for position in range(length)]


@pytest.mark.parametrize("kind", KINDS)
def test_place_and_token_are_inverse(kind: TokenLayoutKind) -> None:
    for case in (case for case in CASES if case.kind == kind):
        places = [case.place(*token) for token in tokens(case)]
        assert len(set(places)) == len(places), case
        assert all(0 <= rank < case.ranks and 0 <= row < case.rows for rank, row in places), case
        assert [case.token_at(*place) for place in places] == tokens(case), case
        empty = set(product(range(case.ranks), range(case.rows))) - set(places)
        assert {case.token_at(*place) for place in empty} <= {None}, case


@pytest.mark.parametrize("kind", KINDS)
def test_every_response_token_is_scored_once(kind: TokenLayoutKind) -> None:
    for case in (case for case in CASES if case.kind == kind):
        prompts = [max(1, length // 2) for length in case.lengths]
        found = sorted(
            (sample, position)
            for rank in range(case.ranks)
            for _, sample, position in case.response_rows(rank, prompts)
        )
        wanted = [(s, p) for s, length in enumerate(case.lengths) for p in range(length - prompts[s])]
        assert found == wanted, case


def test_the_published_zigzag_example() -> None:
    case = TokenMap("zigzag", 2, (11,))
    assert [case.token_at(0, row) for row in range(6)] == [(0, 0), (0, 1), (0, 2), (0, 9), (0, 10), None]
    assert [case.token_at(1, row) for row in range(6)] == [(0, p) for p in range(3, 9)]
    assert case.response_rows(0, [3]) == [(2, 0, 0), (3, 0, 7)]
    assert case.response_rows(1, [3]) == [(row, 0, row + 1) for row in range(6)]


@pytest.mark.parametrize(
    ("case", "rows", "ends"),
    [
        (TokenMap("single", 1, (11, 5), 8), 16, [0, 11, 16]),
        (TokenMap("single", 1, (11, 4), 8), 16, [0, 11, 15, 16]),
        (TokenMap("zigzag", 2, (11, 5), 4), 12, [0, 12, 20, 24]),
        (TokenMap("allgather", 2, (11, 4), 4), 8, [0, 11, 15, 16]),
    ],
)
def test_rows_and_cumulative_lengths(case: TokenMap, rows: int, ends: list[int]) -> None:
    assert (case.rows, case.cumulative_lengths()) == (rows, ends)


def test_outside_a_sample_is_no_place() -> None:
    with pytest.raises(ValueError, match="positions 0 to 3, got 4"):
        TokenMap("single", 1, (4,)).place(0, 4)


def test_a_map_checks_its_layout_like_a_request() -> None:
    for wrong in (lambda: TokenMap("single", 2, (4,)), lambda: TokenLayout(2, 0, "single")):
        with pytest.raises(ValueError, match="single means one rank"):
            wrong()
    with pytest.raises(ValueError, match="at least 1"):
        TokenMap("single", 1, (0,))
