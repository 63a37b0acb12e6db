"""Ranks as forked processes whose regions are shared memory, with the GPU kernels in Triton's interpreter.

`TRITON_INTERPRET=1 python interpreted_peers.py DIRECTORY [OLD NEW]` exits with 1 when a value is wrong; OLD is replaced
by NEW in the kernels before. The interpreter cuts off where it should round, so sums stay fp32 here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from samebits.collectives import fold_neighbours, kernels, peer_memory
from samebits.collectives import triton as launches
from samebits.collectives.device_memory import DeviceMemory

RANKS, CAPACITY = 2, 4096
SIZES = (5, 130, 1400, 480, 64, 2048)  # marked words, direct, shares in two pieces, direct, ...


def partial_of(rank: int, turn: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    exponents = torch.randint(-8, 9, (count,), generator=generator).float()
    return torch.randn(count, generator=generator) * torch.exp2(exponents)


def rank_program(rank: int, regions: list[Tensor]) -> bool:
    memory: Any = DeviceMemory("shared", regions[rank], tuple(r.data_ptr() for r in regions), None)
    watch: Any = SimpleNamespace(words=torch.zeros(1 + RANKS, dtype=torch.int64), check=lambda: None)
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: RANKS)
    transport = peer_memory.PeerMemoryTransport(group, memory, watch, CAPACITY)
    region = transport._region
    right = True
    for turn, count in enumerate(SIZES):
        parts = [partial_of(r, turn, count) for r in range(RANKS)]
        time.sleep(0.2 * (rank == turn % RANKS))  # so that who does not wait reads too early
        found = transport._sum(parts[rank], None, torch.float32)
        right &= torch.equal(found.view(torch.int32), fold_neighbours(parts).view(torch.int32))
        words = torch.stack([p[: region.large_room].view(torch.int32) for p in parts])
        gathered = torch.empty_like(words)
        launches.gather_words(words[rank].contiguous(), gathered, region)
        right &= torch.equal(gathered, words)
        rows = [torch.stack([partial_of(10 * r + row, turn, 130) for row in range(RANKS)]) for r in range(RANKS)]
        share = torch.empty(130)
        launches.sum_large(rows[rank], None, share, region, "own share")
        right &= torch.equal(share, fold_neighbours([r[rank] for r in rows]))
    return right


def faulty(directory: Path, old: str, new: str) -> Any:
    """The kernels with one text replaced, as a module."""
    source = Path(str(kernels.__file__)).read_text(encoding="utf-8")
    assert old in source, f"the kernels have no {old!r}"
    path = directory / "faulty_kernels.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("faulty_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(directory: str, *fault: str) -> int:
    warnings.simplefilter("ignore")
    launches.SMALL_TILE = launches.LARGE_TILE = 64
    launches.SMALL_BLOCKS = launches.LARGE_BLOCKS = 2
    peer_memory.SMALL_BYTES = 4 * 64
    counter = torch.zeros(1, dtype=torch.int64)
    launches.slot = lambda name, device: counter  # type: ignore[assignment]
    peer_memory.ProcessGroupTransport = lambda group: None  # type: ignore[assignment, misc]
    if fault:
        launches.kernels = faulty(Path(directory), *fault)
    size = peer_memory.region_bytes(RANKS, CAPACITY)
    regions = [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(RANKS)]
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            os._exit(0 if rank_program(rank, regions) else 1)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
