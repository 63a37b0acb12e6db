"""Running one function of a test file in several real processes that can form a process group.

    results = run_ranks(__file__, "my_rank", 2, tmp_path)      # [{name: tensor} of rank 0, of rank 1]

The function gets a `Rank` and returns tensors by name. `python -m samebits.testing.ranks` is the other side: it runs
the file, calls its `preload()` where it has one (imports that would cost every rank seconds), and parts into ranks.
Where torch is built for GPUs it parts first: a process that has looked for a card can't hand one on.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

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
    command = [sys.executable, "-W", "ignore", "-m", "samebits.testing.ranks", file, function, str(world)]
    parent = subprocess.Popen(
        [*command, str(directory), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output = parent.communicate(timeout=300)[0]
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
    if parent.returncode != 0:
        raise RuntimeError(f"{function}: {output}")
    return [load_file(directory / f"rank{rank}.safetensors") for rank in range(world)]


def _part(file: str, function: str, world: int, directory: Path, *arguments: str) -> int:
    """Fork one process per rank and wait for all. 1, with the output of the first that failed, or 0."""
    torch.set_num_threads(1)  # a forked process does not have the threads of OpenMP
    program = None if torch.backends.cuda.is_built() else _program(file)
    ranks = [Rank(rank, world, str(directory / "rendezvous")) for rank in range(world)]

    def run(me: Rank) -> None:
        _rank(me, (program or _program(file))[function], directory, *arguments)

    children = [_fork(me, run, directory) for me in ranks]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for rank, code in enumerate(codes):
        if code != 0:
            print(f"rank {rank} of {world} exited with {code}:")
            print(_log(directory, rank).read_text(errors="replace"))
            return 1
    return 0


def _program(file: str) -> dict[str, Any]:
    found = runpy.run_path(file)
    found.get("preload", lambda: None)()
    return found


def _fork(me: Rank, run: Callable[[Rank], None], directory: Path) -> int:
    """The process id of a child that runs `run(me)`, its output in a log."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(_log(directory, me.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run(me)
        code = 0
    except BaseException:  # noqa: BLE001  a forked child must never come back into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _log(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.log"


def _rank(me: Rank, function: Callable[..., dict[str, torch.Tensor]], directory: Path, *arguments: str) -> None:
    tensors = function(me, *arguments)
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / f"rank{me.rank}.safetensors")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    file, function, world, directory, *arguments = sys.argv[1:]
    sys.exit(_part(file, function, int(world), Path(directory), *arguments))
