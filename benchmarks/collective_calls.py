"""The calls that `layouts.py` times, as one rank makes them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives import attach, detach, gather_states, tree_all_reduce, tree_reduce_scatter
from samebits.testing.ranks import Rank

ARMS = ("native gloo", "strict gloo", "strict gloo, guarded", "strict shared memory")


def operations(group: dist.ProcessGroup, kib: int) -> dict[str, tuple[Callable[[], object], ...]]:
    """Per operation the native call and the strict one, on this many KiB of fp32 per rank."""
    own = torch.randn(kib * 256)
    whole = torch.empty(kib * 256 * group.size())
    share = torch.empty(kib * 256 // group.size())

    def native_sum() -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    def native_gather() -> None:
        dist.all_gather(list(whole.chunk(group.size())), own, group=group)

    def native_share() -> None:
        dist.reduce_scatter(share, list(own.chunk(group.size())), group=group)

    return {
        "all-reduce": (native_sum, lambda: tree_all_reduce(own, group)),
        "reduce-scatter": (native_share, lambda: tree_reduce_scatter(own, group)),
        "all-gather": (native_gather, lambda: gather_states(own, group)),
    }


def program(me: Rank, sizes: str, calls: str) -> dict[str, Tensor]:
    """Microseconds of every call: [arm, call] by operation and size. The arms take turns, call by call."""
    group = me.join()
    ranks = list(range(me.world))
    shared = dist.new_group(ranks)
    guarded = dist.new_group(ranks)
    attach(shared, "shared_memory")
    attach(guarded, "gloo")
    found: dict[str, Tensor] = {}
    for kib in json.loads(sizes):
        every = [operations(one, kib) for one in (group, guarded, shared)]
        for name in every[0]:
            arms = [every[0][name][0], *(one[name][1] for one in every)]
            taken = torch.zeros(len(arms), int(calls))
            for call in range(int(calls)):
                for arm, run in enumerate(arms):
                    began = time.perf_counter()
                    run()
                    taken[arm, call] = (time.perf_counter() - began) * 1e6
            found[f"{name} {kib}"] = taken[:, int(calls) // 5 :]
    for one in (shared, guarded):
        detach(one)
    return found
