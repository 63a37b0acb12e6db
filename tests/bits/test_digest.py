"""The digest of a tensor: its type, shape and bytes, wherever it lies."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch

from samebits.bits import assert_same, digest

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [0, 1, 300])
def test_a_digest_is_that_of_type_shape_and_bytes(device: str, size: int) -> None:
    words = torch.randint(-32768, 32768, (size,), dtype=torch.int16, generator=torch.Generator().manual_seed(size))
    expected = sha256(f"torch.bfloat16[{size}]".encode() + words.numpy().tobytes()).hexdigest()
    assert digest(words.view(torch.bfloat16).to(device)) == expected


def test_a_difference_shows_the_bits_of_a_signalling_nan() -> None:
    left, right = (torch.tensor([word], dtype=torch.int32).view(torch.float32) for word in (0x7F800001, 0x7FC00001))
    with pytest.raises(AssertionError, match=r"nan \(0x7f800001\) against nan \(0x7fc00001\)"):
        assert_same(left, right)
