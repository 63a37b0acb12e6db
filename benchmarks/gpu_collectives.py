"""All-reduce over peer memory beside NCCL and vLLM's custom all-reduce, eagerly and in captured graphs.

`python benchmarks/gpu_collectives.py --commit HASH [--ranks 2] [--vllm]` on a machine with a card for each rank;
`--vllm` where vLLM can be imported; `--one-step BYTES` and `--direct BYTES` move the ends of these forms. A size is
that of the fp32 partial sums that a rank brings; every side adds as many values. `strict` is the tree in fp32 with one
rounding to bf16, `strict fp32` the same without rounding; the peers add bf16, as a native layer does, or fp32. All
sides of a size take turns; a time is the slowest rank's median.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives import attach, detach, peer_memory, tree_all_reduce, tree_all_reduce_bf16
from samebits.testing.ranks import Rank, run_ranks

SIZES = tuple(4096 << (2 * step) for step in range(8))  # 4 KiB to 64 MiB
PEERS = ("NCCL bf16", "NCCL fp32", "vLLM bf16", "vLLM fp32")
SIDES = ("strict", "strict fp32", *PEERS)
MODES = ("captured", "eager")
REPEATS = 9
WIDTH = 1024

Call = Callable[[], object]


def program(me: Rank, vllm: str, one_step: str, direct: str) -> dict[str, Tensor]:
    """Seconds of a call, [mode, size, side], NaN where a side does not serve a size."""
    torch.cuda.set_device(me.rank)
    peer_memory.SMALL_BYTES, peer_memory.DIRECT_BYTES = int(one_step), int(direct)
    group = me.join()
    device = torch.device("cuda", me.rank)
    attach(group, "peer_memory")
    nccl = dist.new_group(backend="nccl", device_id=device)
    custom = _custom_all_reduce(group, device) if vllm == "vllm" else None
    found = torch.full((len(MODES), len(SIZES), len(SIDES)), float("nan"), dtype=torch.float64)
    for number, size in enumerate(SIZES):
        values = torch.randn(size // 4 // WIDTH, WIDTH, device=device)
        sides = _sides(values, group, nccl, custom)
        calls = 50 if size <= 1 << 20 else 10
        for mode, times in enumerate((_captured(sides, custom, calls, group), _eager(sides, calls, group))):
            for name, seconds in times.items():
                found[mode, number, SIDES.index(name)] = seconds
    detach(group)
    return {"seconds": found}


def _sides(values: Tensor, group: dist.ProcessGroup, nccl: dist.ProcessGroup, custom: Any) -> dict[str, Call]:
    rounded = values.bfloat16()
    # added in place: on zeros, so that nothing grows to infinity
    zeros, rounded_zeros = torch.zeros_like(values), torch.zeros_like(rounded)
    sides: dict[str, Call] = {
        "strict": lambda: tree_all_reduce_bf16(values, group),
        "strict fp32": lambda: tree_all_reduce(values, group),
        "NCCL bf16": lambda: dist.all_reduce(rounded_zeros, group=nccl),
        "NCCL fp32": lambda: dist.all_reduce(zeros, group=nccl),
    }
    if custom is not None:
        sides |= {
            "vLLM bf16": lambda: custom.custom_all_reduce(rounded),
            "vLLM fp32": lambda: custom.custom_all_reduce(values),
        }
    return sides


def _custom_all_reduce(group: dist.ProcessGroup, device: torch.device) -> Any:
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    made = CustomAllreduce(group, device, max_size=2 * SIZES[-1])
    if made.disabled:
        raise RuntimeError("vLLM's custom all-reduce does not serve these cards")
    return made


def _captured(sides: dict[str, Call], custom: Any, calls: int, group: dist.ProcessGroup) -> dict[str, float]:
    graphs = {name: _graph(call, custom, calls) for name, call in sides.items()}
    return _in_turn({name: graph.replay for name, graph in graphs.items()}, calls, group)


def _graph(call: Call, custom: Any, calls: int) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    registering: AbstractContextManager[None] = nullcontext() if custom is None else custom.capture()
    with registering, torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def _eager(sides: dict[str, Call], calls: int, group: dist.ProcessGroup) -> dict[str, float]:
    def repeated(call: Call) -> Call:
        return lambda: [call() for _ in range(calls)]

    return _in_turn({name: repeated(call) for name, call in sides.items()}, calls, group)


def _in_turn(runs: dict[str, Call], calls: int, group: dist.ProcessGroup) -> dict[str, float]:
    """Median seconds of one of `calls` calls; the first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(REPEATS + 1):
        for name, run in runs.items():
            dist.barrier(group)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn:
                taken[name].append(start.elapsed_time(end) * 1e-3 / calls)
    return {name: median(times) for name, times in taken.items()}


def main() -> None:
    # here, because the ranks load this file by its path
    from gpu_timing import origin
    from results import save

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--one-step", type=int, default=peer_memory.SMALL_BYTES)
    parser.add_argument("--direct", type=int, default=peer_memory.DIRECT_BYTES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        words = ("vllm" if arguments.vllm else "", str(arguments.one_step), str(arguments.direct))
        ranks = run_ranks(__file__, "program", arguments.ranks, Path(home) / "ranks", *words)
    seconds = torch.stack([rank["seconds"] for rank in ranks]).amax(0)
    records = [
        {
            "mode": mode, "bytes": size,
            **{side: value for side, value in zip(SIDES, seconds[m, s].tolist(), strict=True) if value == value},
        }
        for m, mode in enumerate(MODES)
        for s, size in enumerate(SIZES)
    ]  # fmt: skip
    command = f"python benchmarks/gpu_collectives.py --ranks {arguments.ranks}" + " --vllm" * arguments.vllm
    command += f" --one-step {arguments.one_step} --direct {arguments.direct}"
    head = {"origin": origin(arguments.commit), "command": command, "ranks": arguments.ranks}
    save("gpu_collectives", {**head, "records": records})
    for record in records:
        times = ", ".join(f"{side} {record[side] * 1e6:.1f}" for side in SIDES if side in record)
        print(record["mode"], f"{record['bytes'] // 1024} KiB:", times, "us")


if __name__ == "__main__":
    main()
