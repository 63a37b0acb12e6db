"""Counts over bit patterns, against an independent computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.evidence.compare import compare
from samebits.evidence.verdict import Verdict, judge

BITS = st.integers(0, 2**32 - 1)
NEAR = st.tuples(BITS, st.integers(0, 31)).map(lambda pair: (pair[0], pair[0] ^ (1 << pair[1])))
PAIRS = st.one_of(BITS.map(lambda bits: (bits, bits)), NEAR, st.tuples(BITS, BITS))


@given(rows=st.lists(st.lists(PAIRS, max_size=20), max_size=6))
def test_counts_agree_with_numpy(rows: list[list[tuple[int, int]]]) -> None:
    found = compare((str(at), [left for left, _ in row], [right for _, right in row]) for at, row in enumerate(rows))
    flat = np.array([pair for row in rows for pair in row], dtype=np.uint32).reshape(-1, 2)
    with np.errstate(all="ignore"):
        values = flat.view(np.float32).astype(np.float64)
        finite = np.isfinite(values).all(axis=1)
        difference = np.abs(values[finite, 0] - values[finite, 1])
    assert found.compared_tokens == len(flat)
    assert found.mismatch_count == int((flat[:, 0] != flat[:, 1]).sum())
    assert found.nonfinite_count == int((~finite).sum())
    assert found.max_abs_diff == max(difference, default=0.0)
    assert found.mean_abs_diff == math.fsum(difference) / max(len(difference), 1)
    assert (found.worst is not None) == (found.mismatch_count > 0)


@given(row=st.lists(PAIRS, min_size=1, max_size=20), data=st.data())
def test_the_order_of_tokens_moves_no_number(row: list[tuple[int, int]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(row))
    first, second = (
        compare([("0", [left for left, _ in pairs], [right for _, right in pairs])]) for pairs in (row, shuffled)
    )
    assert (first.mismatch_count, first.max_abs_diff, first.mean_abs_diff) == (
        second.mismatch_count,
        second.max_abs_diff,
        second.mean_abs_diff,
    )


def test_the_two_zeros_differ() -> None:
    found = compare([("1/2/3", [0x00000000], [0x80000000])])
    assert (found.mismatch_count, found.max_abs_diff, str(found.worst)) == (1, 0.0, "1/2/3@0")


def test_the_worst_token_is_named_with_both_values() -> None:
    found = compare([("1/0/0", [0xBF800000, 0xBF800000], [0xBF800001, 0xBF800000]), ("1/0/1", [1], [2])])
    assert found.worst is not None
    assert found.worst.describe() == ("1/0/0@0: rollout -1.0 (0xbf800000), trainer -1.0000001192092896 (0xbf800001)")


def test_a_gap_is_an_error() -> None:
    with pytest.raises(ValueError, match="sample 1/0/0: 2 log-probabilities from rollout, 1 from trainer"):
        compare([("1/0/0", [1, 2], [1])])


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ((0, 0, 0), Verdict.CANNOT_TELL),
        ((5, 0, 0), Verdict.SAME),
        ((5, 1, 0), Verdict.DIFFERENT),
        ((5, 0, 1), Verdict.CANNOT_TELL),
        ((5, 1, 1), Verdict.DIFFERENT),
    ],
)
def test_the_verdict_over_counts(counts: tuple[int, int, int], verdict: Verdict) -> None:
    assert judge(*counts) is verdict
    assert verdict.exit_code == {"same": 0, "different": 1, "cannot tell": 2}[verdict.value]
