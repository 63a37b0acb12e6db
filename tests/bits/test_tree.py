"""Content names of weights: the definition with hashlib, on a CPU and on a card."""

from __future__ import annotations

import hashlib

import pytest
import torch

from samebits.bits import part_digests, tree_digest, tree_digests
from samebits.bits.tree import LEAF


def defined(tensor: torch.Tensor) -> str:
    """The name as samebits.bits.tree says it in words."""
    held = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    leaves = b"".join(hashlib.sha256(held[at : at + LEAF]).digest() for at in range(0, len(held), LEAF))
    return hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode() + leaves).hexdigest()


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"leaf": (LEAF // 2,), "less": (5, 7), "more": (130, 257), "empty": (0, 3), "one": (1,)}
    return {name: torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}


def test_names_are_as_defined() -> None:
    held = tensors()
    assert tree_digests(held) == {name: defined(tensor) for name, tensor in held.items()}
    assert tree_digest(held["more"].float()) == defined(held["more"].float())


def test_parts_are_named_as_tensors_of_their_own() -> None:
    held = tensors()
    parts = [("more", 0, 3, 130), ("more", 1, 128, 257), ("less", 1, 0, 1)]
    wanted = [defined(held[name].narrow(dim, start, stop - start)) for name, dim, start, stop in parts]
    assert part_digests(held, parts) == wanted


@pytest.mark.parametrize("at", [0, LEAF // 2 - 1, LEAF // 2, 130 * 257 - 1])
def test_every_bit_counts(at: int) -> None:
    tensor = tensors()["more"]
    other = tensor.clone()
    other.view(torch.int16).view(-1)[at] ^= 1
    assert tree_digest(other) != tree_digest(tensor)
    assert tree_digest(tensor.view(257, 130)) != tree_digest(tensor), "the shape counts, too"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_a_card_gives_the_names_of_the_host() -> None:
    held = tensors() | {"odd": tensors()["more"].view(-1)[1:], "large": torch.randn(3000, 4099).bfloat16()}
    assert tree_digests({name: tensor.cuda() for name, tensor in held.items()}) == tree_digests(held)
    parts = [("large", 1, 1, 4098), ("large", 0, 17, 2999)]
    assert part_digests({name: tensor.cuda() for name, tensor in held.items()}, parts) == part_digests(held, parts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_names_wait_for_the_stream_that_writes() -> None:
    held = torch.randn(4000, 4096).bfloat16()
    late = torch.zeros_like(held, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)
        late.copy_(held.cuda())
        assert tree_digest(late) == tree_digest(held)
