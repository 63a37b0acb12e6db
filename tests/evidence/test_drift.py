"""Drift between the two policies, against numpy in float64, and what its merging over steps keeps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.evidence.drift import PERCENTILES, TRUNCATION, agrees, drift, merged, nearest_rank

CLIP = 0.2
LOGP = st.floats(-60.0, 0.0, width=32)
ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)
PAIRS = st.one_of(st.tuples(LOGP, LOGP), LOGP.map(lambda value: (value, value)), st.tuples(ANY, ANY))
SAMPLES = st.lists(st.tuples(st.lists(PAIRS, min_size=1, max_size=12), st.floats(-3, 3)), min_size=1, max_size=6)


def bits(values: list[float]) -> list[int]:
    return np.array(values, dtype=np.float32).view(np.uint32).tolist()


def as_samples(rows: list[tuple[list[tuple[float, float]], float]]) -> list[tuple[list[int], list[int], float]]:
    return [(bits([a for a, _ in row]), bits([b for _, b in row]), advantage) for row, advantage in rows]


def by_numpy(rows: list[tuple[list[tuple[float, float]], float]]) -> tuple[int, dict[str, float]]:
    pairs = np.array([pair for row, _ in rows for pair in row], dtype=np.float32).astype(np.float64)
    advantage = np.array([a for row, a in rows for _ in row])
    with np.errstate(all="ignore"):
        log = pairs[:, 1] - pairs[:, 0]
        finite = np.isfinite(pairs).all(axis=1)
        log, advantage = log[finite], advantage[finite]
        if not len(log):
            return 0, {}
        ratio = np.exp(np.minimum(log, math.log(1.7e308)))
        k3 = np.expm1(np.minimum(log, math.log(1.7e308))) - log
    clipped = ((advantage > 0) & (ratio > 1 + CLIP)) | ((advantage < 0) & (ratio < 1 - CLIP))
    return len(log), {
        **{
            f"logp_abs_diff_{name}": float(np.percentile(abs(log), p, method="inverted_cdf"))
            for name, p in PERCENTILES.items()
        },
        "ratio_min": ratio.min(),
        "ratio_mean": (ratio / len(ratio)).sum(),
        "ratio_max": ratio.max(),
        "kl_k1": -log.mean(),
        "kl_k2": (log / len(log) * log / 2).sum(),
        "kl_k3": (k3 / len(k3)).sum(),
        "clip_fraction": clipped.mean(),
        "clip_fraction_corrected": 0.0,
        "is_truncated_fraction": (ratio > TRUNCATION).mean(),
    }


@given(rows=SAMPLES)
def test_metrics_agree_with_numpy(rows: Any) -> None:
    tokens, found = drift(as_samples(rows), CLIP)
    expected_tokens, expected = by_numpy(rows)
    assert (tokens, set(found)) == (expected_tokens, set(expected))
    assert all(math.isfinite(value) for value in found.values())
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@given(rows=SAMPLES, cut=st.integers(0, 6))
def test_merging_the_parts_gives_the_whole(rows: Any, cut: int) -> None:
    samples = as_samples(rows)
    whole = drift(samples, CLIP)[1]
    found = merged([drift(samples[:cut], CLIP), drift(samples[cut:], CLIP)])
    assert set(found) == {name for name in whole if not name.startswith("logp_abs_diff_")}
    for name, value in found.items():
        assert value == pytest.approx(whole[name], rel=1e-9, abs=1e-12), name


def test_the_same_bits_do_not_drift() -> None:
    values = bits([-0.5, -3.25, -1e-9])
    tokens, found = drift([(values, values, 1.0)], CLIP)
    assert tokens == 3
    assert {found[name] for name in ("ratio_min", "ratio_mean", "ratio_max")} == {1.0}
    assert all(value == 0.0 for name, value in found.items() if not name.startswith("ratio"))


def test_nothing_measured_is_nothing_and_not_zero() -> None:
    nan = bits([math.nan])
    assert drift([(nan, nan, 1.0)], CLIP) == (0, {})
    assert drift([], CLIP) == (0, {})
    assert merged([(0, {}), (0, {})]) == {}


def test_drift_clips_tokens_that_no_update_has_moved() -> None:
    """Old policy of the rollout: two of three tokens give no gradient; recomputed by the trainer: none is lost."""
    rollout, trainer = bits([-1.0, -1.0, -1.0]), bits([-0.5, -1.5, -1.0])
    _, up = drift([(rollout, trainer, 1.0)], CLIP)
    _, down = drift([(rollout, trainer, -1.0)], CLIP)
    assert up["clip_fraction"] == down["clip_fraction"] == pytest.approx(1 / 3)
    assert up["clip_fraction_corrected"] == 0.0
    assert up["kl_k1"] == pytest.approx(0.0)
    assert up["kl_k3"] > 0


def test_ranks_are_nearest() -> None:
    values = [float(value) for value in range(1, 1001)]
    assert [nearest_rank(values, p) for p in (50, 90, 99, 99.9, 100)] == [500, 900, 990, 999, 1000]
    assert nearest_rank([7.0], 0.1) == 7.0


def test_a_difference_in_a_metric_is_named() -> None:
    left = {"kl_k1": 0.5, "ratio_max": 1.0}
    assert agrees(left, left) is None
    assert agrees(left, {**left, "ratio_max": 1.0 + 1e-6}) == "ratio_max"
    assert agrees({}, left) == "kl_k1"
    assert agrees(left, {}) == "kl_k1"
