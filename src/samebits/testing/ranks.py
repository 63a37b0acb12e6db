"""Running one function of a test file in several real processes that can form a process group.

    results = run_ranks(__file__, "my_rank", 2, tmp_path)      # [{name: tensor} of rank 0, of rank 1]

The function gets a `Rank` and returns tensors by name. `python -m samebits.testing.ranks` is the child's side.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Rank:
    """Who a child process is, and the file through which it finds the others."""

    rank: int
    world: int
    rendezvous: str

    def join(self) -> dist.ProcessGroup:
        """Form a gloo group of all ranks."""
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.rendezvous}",
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=120),
        )
        assert dist.group.WORLD is not None
        return dist.group.WORLD


def run_ranks(file: str, function: str, world: int, directory: Path, *arguments: str) -> list[dict[str, torch.Tensor]]:
    """Call `function(Rank, *arguments)` of `file` in `world` processes; what each returned, in rank order.

    `directory` must be empty of earlier runs of this function. Raises RuntimeError with the output of the
    first process that failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    common = [sys.executable, "-W", "ignore", "-m", "samebits.testing.ranks", file, function, str(world)]
    children = [
        subprocess.Popen(
            [*common, str(rank), str(directory), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(world)
    ]
    try:
        outputs = [child.communicate(timeout=300)[0].decode(errors="replace") for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for rank, (child, output) in enumerate(zip(children, outputs, strict=True)):
        if child.returncode != 0:
            raise RuntimeError(f"{function}: rank {rank} of {world} exited with {child.returncode}:\n{output}")
    return [load_file(directory / f"rank{rank}.safetensors") for rank in range(world)]


def _child(file: str, function: str, world: str, rank: str, directory: str, *arguments: str) -> None:
    me = Rank(int(rank), int(world), str(Path(directory) / "rendezvous"))
    torch.set_num_threads(1)
    tensors = runpy.run_path(file)[function](me, *arguments)
    save_file({name: t.contiguous() for name, t in tensors.items()}, Path(directory) / f"rank{rank}.safetensors")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    _child(*sys.argv[1:])
