"""What an H200 computed (recipes/sm90_vectors.py recorded it), predicted here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from samebits.arithmetic import dot, sm90
from samebits.bits import assert_same, first_difference
from samebits.testing.dot_inputs import DISTRIBUTIONS

VECTORS = Path(__file__).parents[1] / "fixtures/sm90/h200.safetensors"


def recorded(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    with safe_open(VECTORS, framework="pt") as file:
        acc = file.get_tensor(f"{name}.acc") if f"{name}.acc" in file.keys() else None  # noqa: SIM118
        return file.get_tensor(f"{name}.a"), file.get_tensor(f"{name}.b"), acc, file.get_tensor(f"{name}.card")


def test_the_vectors_say_where_they_come_from() -> None:
    with safe_open(VECTORS, framework="pt") as file:
        metadata = file.metadata()
        names = {key.split(".")[0] for key in file.keys()}  # noqa: SIM118
    assert metadata["card"] == "NVIDIA H200"
    assert set(metadata) == {"card", "driver", "torch", "cuda", "triton", "recipe"}
    assert names == set(DISTRIBUTIONS)
    assert VECTORS.stat().st_size < 1_000_000


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_card_is_predicted_by_bits(name: str, backend: str) -> None:
    a, b, acc, card = recorded(name)
    assert card.shape[0] >= 256
    assert_same(dot(a, b, acc, "sm90", backend), card, name)


@pytest.mark.parametrize(
    ("name", "attribute", "wrong"),
    [
        ("normal", "FRACTION", 24), ("normal", "GROUP", 32), ("underflow_from_zero", "ZERO_EXPONENT", -126),
        ("underflow_from_zero", "ZERO_EXPONENT", -134), ("nans", "NAN", 0x7FC00000),
    ],
)  # fmt: skip
def test_another_model_is_refuted(name: str, attribute: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, acc, card = recorded(name)
    monkeypatch.setattr(sm90, attribute, wrong)
    assert first_difference(sm90.dot(a, b, acc), card) is not None


@pytest.mark.parametrize("name", ["normal", "cancellation"])
def test_the_other_arithmetics_give_other_bits(name: str) -> None:
    a, b, acc, card = recorded(name)
    for arithmetic in ("fma32", "cdna3"):
        assert first_difference(dot(a, b, acc, arithmetic, "cpu"), card) is not None
