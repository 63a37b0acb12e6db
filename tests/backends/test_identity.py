"""What a process says of its kernels, and when it may not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from samebits.backends.identity import kernels
from samebits.bits import assert_same, first_difference
from samebits.collectives.fold import fold_neighbours
from samebits.ops.linear import linear

CPU = torch.device("cpu")


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_a_process_that_flushes_subnormal_numbers_shows_no_proof(flushing: None) -> None:
    with pytest.raises(RuntimeError, match="flushes subnormal numbers"):
        kernels(CPU)
    torch.set_flush_denormal(False)
    assert kernels(CPU)["instruction_set"]


def test_kernels_keep_them_where_sums_of_ranks_do_not(flushing: None) -> None:
    torch.set_flush_denormal(False)
    x, w = (torch.randn(256, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**-66 for seed in (1, 2))
    ranks = list(torch.full((2, 256), 2.0**-128))
    product, total = linear(x.bfloat16(), w.bfloat16()), fold_neighbours(ranks)
    torch.set_flush_denormal(True)
    again, flushed = linear(x.bfloat16(), w.bfloat16()), fold_neighbours(ranks)
    torch.set_flush_denormal(False)
    assert_same(again, product, "linear")
    assert first_difference(flushed, total) is not None
