"""Tensors that several processes read where they lie: their bits, and that memory is its owner's again afterwards.

python -m pytest tests/gpu/test_gpu_lending.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from samebits.bits import assert_same
from samebits.collectives.lending import borrow, lend, lent_shapes
from samebits.testing.ranks import Rank, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

ROUNDS = 3
SHAPES = {"weight": (4096, 1024), "bias": (1000,), "table": (512, 256)}


def tensors_of(turn: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(turn)
    return {name: torch.randn(*shape, generator=generator).bfloat16().to(device) for name, shape in SHAPES.items()}


def rounds(me: Rank, home: str) -> dict[str, Tensor]:
    """Rank 0 lends new tensors in every round, the others read all of them."""
    torch.cuda.set_device(me.rank % torch.cuda.device_count())
    me.join()
    held = []
    for turn in range(ROUNDS):
        folder = Path(home) / str(turn)
        lent = tensors_of(turn, "cuda") if me.rank == 0 else {}
        if lent:
            lend(lent, folder)
        dist.barrier()
        if me.rank:
            assert lent_shapes(folder) == SHAPES
            expected = tensors_of(turn, "cpu")
            found = {name: tensor.cpu() for name, tensor in borrow(folder)}
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                assert_same(tensor, expected[name], f"{name} of round {turn}")
        dist.barrier()
        lent.clear()
        held.append(torch.cuda.memory_allocated())
    return {"held": torch.tensor(held)}


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_memory_that_was_read_is_its_owners_again(tmp_path: Path, readers: int) -> None:
    owner, *_ = run_ranks(__file__, "rounds", 1 + readers, tmp_path / "ranks", str(tmp_path))
    assert owner["held"].tolist() == [0] * ROUNDS
