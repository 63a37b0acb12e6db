"""Work that waits: done when its owner asks, in order for each buffer, and visible to whoever reads afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from samebits.bits import assert_same, first_difference
from samebits.ops.later import LIMIT, Later, when_due

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def step(buffer: Tensor, number: int) -> Callable[[], None]:
    """Work whose order shows, and which takes its time on a card."""

    def work() -> None:
        if buffer.is_cuda:
            torch.cuda._sleep(200_000)
        buffer.mul_(3.0).add_(float(number))

    return work


@pytest.mark.parametrize("device", DEVICES)
def test_work_waits_and_keeps_its_order_on_each_buffer(device: str) -> None:
    at_once, put_off = ([torch.ones(300, device=device) for _ in range(5)] for _ in range(2))
    later = Later(torch.device(device))
    for buffer in put_off:
        later.serve(buffer)
    for number in range(4):
        for first, second in zip(at_once, put_off, strict=True):
            when_due(first, step(first, number))
            when_due(second, step(second, number))
    assert_same(torch.cat(put_off), torch.ones(1500, device=device), "nothing was asked for yet")
    later.run()
    assert_same(torch.cat(put_off), torch.cat(at_once), "all of it, in order")
    when_due(put_off[0], step(put_off[0], 9))
    later.drop()
    later.run()
    assert_same(torch.cat(put_off), torch.cat(at_once), "dropped")


@pytest.mark.parametrize("device", DEVICES)
def test_so_much_may_wait_and_no_more(device: str) -> None:
    buffer, later = torch.ones(300, device=device), Later(torch.device(device))
    later.serve(buffer)
    for number in range(LIMIT - 1):
        when_due(buffer, step(buffer, number % 2))
    assert first_difference(buffer, torch.ones(300, device=device)) is None
    when_due(buffer, step(buffer, 0))
    assert first_difference(buffer, torch.ones(300, device=device)) is not None
