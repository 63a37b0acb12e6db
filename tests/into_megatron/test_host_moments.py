"""AdamW with moments elsewhere: the bits of torch's own, for every fraction and size of piece; streams on a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.bits import assert_same, first_difference
from samebits.into_megatron import host_moments
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.host_moments import HostMomentsAdamW, Piece

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SIZES = ((300, 64), (129,), (4096,), (77, 33), (16, 16, 40))


def groups(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    common = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8}
    return [
        {**common, "params": list(parameters[:3]), "weight_decay": 0.1},
        {**common, "params": list(parameters[3:]), "weight_decay": 0.0},
    ]


def trained(device: str, fraction: float | None, piece: int = 1 << 20) -> Tensor:
    """All parameters after five steps with a learning rate that changes; torch's own optimizer without a fraction."""
    generator = torch.Generator().manual_seed(1)

    def drawn(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    parameters = [drawn(size) for size in SIZES]
    made = groups(parameters)
    own = torch.optim.AdamW(made, fused=True) if fraction is None else HostMomentsAdamW(made, fraction, piece)
    for step in range(5):
        for parameter in parameters:
            parameter.grad = drawn(tuple(parameter.shape))
        for group in own.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        own.step()
    return torch.cat([parameter.flatten().cpu() for parameter in parameters])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("piece", [64, 1024, 1 << 20])
def test_no_fraction_and_no_piece_changes_a_bit(device: str, fraction: float, piece: int) -> None:
    assert_same(trained(device, fraction, piece), trained(device, None), f"{fraction} in pieces of {piece}")


@pytest.mark.parametrize("device", DEVICES)
def test_moments_that_do_not_come_back_are_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(card: Any, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        return (piece.moments.to(device, copy=True) for piece in pieces)

    monkeypatch.setattr(host_moments._Card, "visits", lost)
    monkeypatch.setattr(host_moments, "_where_they_are", partial(lost, None))
    difference = first_difference(trained(device, 1.0, 1024), trained(device, None))
    assert difference is not None
    assert difference.count > 256


def test_the_fraction_counts_elements_of_whole_parameters() -> None:
    parameters = [torch.zeros(size) for size in (10, 30, 60)]
    for fraction, hosted in ((0.0, 0), (0.05, 10), (0.1, 10), (0.11, 40), (1.0, 100)):
        made = HostMomentsAdamW(groups(parameters), fraction, 16)
        assert sum(piece.moments.shape[1] for _, piece in made._pieces) == hosted


def test_what_cannot_be_taken_off_a_card_is_refused() -> None:
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 2.0"):
        HostMomentsAdamW(groups([torch.zeros(3)]), 2.0)
    with pytest.raises(ValueError, match="in the host's memory already"):
        TrainerConfig(model="m", optimizer_offload=0.5)
    with pytest.raises(ValueError, match=r"optimizer_offload must be in \[0, 1\], got -1.0"):
        TrainerConfig(model="m", device="cuda", optimizer_offload=-1.0)
