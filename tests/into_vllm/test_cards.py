"""Which cards an engine's processes see, and in which order."""

from __future__ import annotations

import pytest
import torch

from samebits.cli import wiring
from samebits.into_vllm.settings import visible
from samebits.rl.config import RunConfig


def placed(monkeypatch: pytest.MonkeyPatch, count: int, **settings: object) -> list[tuple[int, ...]]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    config = RunConfig(device="cuda", **settings)  # type: ignore[arg-type]
    return [wiring.engine_cards(config, index) for index in range(config.rollout_engines)]


def test_engines_take_the_cards_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(monkeypatch, 4, rollout_engines=2, rollout_tp=2) == [(0, 1, 2, 3), (2, 3, 0, 1)]
    assert placed(monkeypatch, 2, rollout_engines=3) == [(0, 1), (1, 0), (0, 1)]
    assert placed(monkeypatch, 1, rollout_engines=2) == [(), ()], "one card is what it is"


def test_workers_need_a_card_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rollout_tp 4: each worker of vLLM needs a card of its own, and there are 2"):
        placed(monkeypatch, 2, rollout_tp=4)


@pytest.mark.parametrize(
    ("seen", "shown"), [("", "2,3,0,1"), ("4,5,6,7", "6,7,4,5"), ("GPU-a,GPU-b,c,d", "c,d,GPU-a,GPU-b")]
)
def test_cards_keep_the_names_that_this_process_knows(monkeypatch: pytest.MonkeyPatch, seen: str, shown: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert visible((2, 3, 0, 1)) == shown
