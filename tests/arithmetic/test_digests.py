"""The content name of a tensor: its type, shape and bytes, wherever it lies and however it is read."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch

from samebits.bits import digest, digests

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PIECE = 1 << 22


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [0, 1, 300, PIECE - 1, PIECE, 2 * PIECE + 3])
def test_a_digest_is_that_of_type_shape_and_bytes(device: str, size: int) -> None:
    words = torch.randint(-32768, 32768, (size,), dtype=torch.int16, generator=torch.Generator().manual_seed(size))
    expected = sha256(f"torch.bfloat16[{size}]".encode() + words.numpy().tobytes()).hexdigest()
    tensor = words.view(torch.bfloat16).to(device)
    assert digest(tensor) == expected
    assert digests({"x": tensor, "same": tensor.clone()}) == {"x": expected, "same": expected}


def test_the_last_element_of_the_last_piece_counts() -> None:
    words = torch.zeros(PIECE + 2, dtype=torch.int16)
    before = digest(words)
    words[-1] = 1
    assert digest(words) != before
