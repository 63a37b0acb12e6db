"""Group advantages: normalised, defined for equal rewards, the same whatever the group's company."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.rl.advantage import group_advantages

REWARDS = st.lists(st.floats(-10, 10).map(lambda value: round(value, 3)), min_size=1, max_size=16)


@given(rewards=REWARDS)
def test_advantages_have_mean_zero_and_keep_the_order(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert len(advantages) == len(rewards)
    pairs = list(zip(advantages, rewards, strict=True))
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    assert all((a > b) == (x > y) for a, x in pairs for b, y in pairs)


@given(reward=st.floats(-10, 10), size=st.integers(1, 16))
def test_equal_rewards_give_exact_zeros(reward: float, size: int) -> None:
    assert group_advantages([reward] * size) == (0.0,) * size


def test_one_right_of_four() -> None:
    high, low, *_ = group_advantages([1.0, 0.0, 0.0, 0.0])
    assert high == pytest.approx(math.sqrt(3), rel=1e-5)
    assert low == pytest.approx(-1 / math.sqrt(3), rel=1e-5)


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan], [math.inf]])
def test_what_cannot_be_normalised_is_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="group_advantages"):
        group_advantages(rewards)
