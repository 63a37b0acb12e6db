"""Collectives of GPU ranks: the bits of the CPU's tree, eagerly and in graphs, under delays; trouble is named.

Ranks have a card each where there are enough, and share cards otherwise.
python -m pytest tests/gpu/test_gpu_collectives.py
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from samebits.arithmetic.rounding import round_bf16
from samebits.bits import assert_same, first_difference
from samebits.collectives import (
    all_gather_rows,
    attach,
    check,
    copy_to_group,
    detach,
    fold_neighbours,
    gather_rows,
    gather_states,
    shared_fate,
    tree_all_reduce,
    tree_all_reduce_bf16,
    tree_reduce_scatter,
)
from samebits.testing.ranks import Rank, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

CAPACITY = 2 << 20  # of which the larger payloads need several
WIDTH = 256
ROWS = (1, 3, 256, 1024, 1028, 4099)  # of fp32: from one block to three pieces; two ranks send 1024 whole
HARD = (float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, 1.0, 2**-24, 16777216.0, -16777217.0)


def partial_of(rank: int, turn: int, rows: int, hard: bool = False) -> Tensor:
    """fp32 [rows, WIDTH] of many magnitudes, so that the order of additions shows; `hard`: of values at the edges."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    if hard:
        return torch.tensor(HARD)[torch.randint(0, len(HARD), (rows, WIDTH), generator=generator)]
    exponents = torch.randint(-8, 9, (rows, WIDTH), generator=generator).float()
    return torch.randn(rows, WIDTH, generator=generator) * torch.exp2(exponents)


def balanced(ranks: int, turn: int, rows: int, hard: bool = False) -> Tensor:
    return fold_neighbours([partial_of(rank, turn, rows, hard) for rank in range(ranks)])


def bias_of(turn: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(turn)).bfloat16()


def assert_numbers_same(found: Tensor, expected: Tensor, what: str) -> None:
    """The same bits, except that a NaN (infinities that cancel) is any NaN."""
    assert torch.equal(found.isnan(), expected.isnan()), what
    assert_same(
        found.nan_to_num(1.5, float("inf"), float("-inf")), expected.nan_to_num(1.5, float("inf"), float("-inf")), what
    )


def join(me: Rank) -> ProcessGroup:
    torch.cuda.set_device(me.rank % torch.cuda.device_count())
    return me.join()


def groups_of(me: Rank) -> dict[str, ProcessGroup]:
    """A group per way of moving bytes."""
    join(me)
    everybody = list(range(me.world))
    found = {name: dist.new_group(everybody) for name in ("peer memory", "gloo", "guarded gloo")}
    attach(found["peer memory"], "peer_memory", timeout=60.0, capacity=CAPACITY)
    attach(found["guarded gloo"], "gloo", timeout=60.0)
    if torch.cuda.device_count() >= me.world:
        device = torch.device("cuda", torch.cuda.current_device())
        found["NCCL"] = dist.new_group(everybody, backend="nccl", device_id=device)
    return found


def everything(me: Rank, group: ProcessGroup, device: str) -> dict[str, Tensor]:
    """Every function with its gradient."""
    partial = partial_of(me.rank, 1, 256).to(device).requires_grad_()
    reduced = tree_all_reduce(partial, group)
    (grad_reduced,) = torch.autograd.grad(reduced, partial, partial_of(9, 1, 256).to(device))
    scattered = tree_reduce_scatter(partial, group)
    (grad_scattered,) = torch.autograd.grad(scattered, partial, scattered.detach() * (me.rank + 1))
    leaf = partial_of(5, 1, 256).bfloat16().to(device).requires_grad_()
    (grad_entered,) = torch.autograd.grad(copy_to_group(leaf, group), leaf, partial.detach().bfloat16())
    gathered = gather_rows(leaf, group)
    (grad_gathered,) = torch.autograd.grad(gathered, leaf, partial.detach().bfloat16().repeat(me.world, 1))
    odd = (torch.arange(-32768, 32768, dtype=torch.int32) + me.rank).to(torch.int16).view(-1, 16).to(device)
    found = {
        "reduced": reduced, "grad_reduced": grad_reduced, "scattered": scattered, "grad_scattered": grad_scattered,
        "grad_entered": grad_entered, "gathered": gathered, "grad_gathered": grad_gathered,
        "every bf16": all_gather_rows(odd, group), "odd bytes": all_gather_rows(odd.view(torch.uint8)[:, :3], group),
        "rounded": tree_all_reduce_bf16(partial, group, bias_of(1).to(device)),
    }  # fmt: skip
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def same_as_the_cpu(me: Rank) -> dict[str, Tensor]:
    groups = groups_of(me)
    expected = everything(me, groups["gloo"], "cpu")
    for carrier, group in groups.items():
        for name, tensor in everything(me, group, "cuda").items():
            assert_same(tensor, expected[name], f"{name} over {carrier}")
        for turn, rows in enumerate(ROWS):
            for hard in (False, True):
                sizes_and_values(me, group, turn, rows, hard, carrier)
    detach(groups["peer memory"])
    detach(groups["guarded gloo"])
    return {"carriers": torch.tensor([len(groups)])}


def sizes_and_values(me: Rank, group: ProcessGroup, turn: int, rows: int, hard: bool, carrier: str) -> None:
    what = f"{rows} rows{', hard' if hard else ''}, over {carrier}"
    partial, total = partial_of(me.rank, turn, rows, hard).cuda(), balanced(me.world, turn, rows, hard)
    assert_numbers_same(tree_all_reduce(partial, group).cpu(), total, f"tree sum of {what}")
    rounded = tree_all_reduce_bf16(partial, group).cpu()
    assert_same(rounded, round_bf16(total), f"rounded sum of {what}")
    with_bias = tree_all_reduce_bf16(partial, group, bias_of(turn).cuda()).cpu()
    assert_same(with_bias, round_bf16(total + bias_of(turn).float()), f"rounded sum with bias of {what}")
    if rows % me.world == 0:
        own = total.view(me.world, -1, WIDTH)[me.rank]
        assert_numbers_same(tree_reduce_scatter(partial, group).cpu(), own, f"share of {what}")
    gathered = gather_states(partial, group).cpu()
    assert_same(gathered, torch.stack([partial_of(r, turn, rows, hard) for r in range(me.world)]), f"gather of {what}")


def captured(me: Rank) -> dict[str, Tensor]:
    """Graphs of calls of both forms, replayed in turns with eager calls; the kernels count their generations on."""
    group = join(me)
    attach(group, "peer_memory", timeout=60.0, capacity=CAPACITY)
    small, large = (torch.empty(rows, WIDTH, device="cuda") for rows in (256, 1028))
    bias = bias_of(0).cuda()

    def calls() -> list[Tensor]:
        return [
            tree_all_reduce_bf16(small, group, bias), tree_all_reduce(large, group), gather_states(small, group),
            tree_reduce_scatter(large, group), tree_all_reduce(small[:1], group),
        ]  # fmt: skip

    small.zero_(), large.zero_()
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = calls()
    for turn in range(1, 9):
        small.copy_(partial_of(me.rank, turn, 256))
        large.copy_(partial_of(me.rank, turn, 1028))
        if turn % 3 == 0:
            found = calls()
        else:
            graph.replay()
            found = outputs
        few, many = balanced(me.world, turn, 256), balanced(me.world, turn, 1028)
        stacked = torch.stack([partial_of(r, turn, 256) for r in range(me.world)])
        expected = [
            round_bf16(few + bias_of(0).float()), many, stacked,
            many.view(me.world, -1, WIDTH)[me.rank], few[:1],
        ]  # fmt: skip
        for number, (tensor, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_same(tensor.cpu(), wanted, f"call {number} of turn {turn}")
    detach(group)
    return {"done": torch.ones(1)}


def delayed(me: Rank) -> dict[str, Tensor]:
    """Sums, shares and gathers of changing sizes, while ranks come late by turns, on the host or on the device."""
    group = join(me)
    attach(group, "peer_memory", timeout=60.0, capacity=CAPACITY)
    dice = random.Random(me.rank)
    partials = {rows: [partial_of(r, rows, rows).cuda() for r in range(me.world)] for rows in (1, 64, 1028)}
    totals = {rows: balanced(me.world, rows, rows).cuda() for rows in partials}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    order = random.Random(0)
    for _ in range(120):
        rows, what = order.choice(list(partials)), order.randrange(3)
        own = partials[rows][me.rank]
        _dawdle(dice)
        if what == 0:
            found, expected = tree_all_reduce(own, group), totals[rows]
        elif what == 1 or rows % me.world:
            found, expected = tree_all_reduce_bf16(own, group), tree_all_reduce_bf16(totals[rows], None)
        else:
            found, expected = tree_reduce_scatter(own, group), totals[rows].view(me.world, -1, WIDTH)[me.rank]
        _dawdle(dice)
        bits = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
        wrong += (found.view(bits) != expected.view(bits)).sum()
    assert wrong.item() == 0, f"{wrong.item()} wrong values"
    check(group)
    detach(group)
    return {"done": torch.ones(1)}


def _dawdle(dice: random.Random) -> None:
    what = dice.randrange(8)
    if what == 0:
        time.sleep(dice.random() * 5e-3)
    elif what == 1:
        torch.cuda._sleep(int(dice.random() * 5e6))


def troubled(me: Rank, what: str) -> dict[str, Tensor]:
    """The last rank errs, dies, comes late or leaves; the others return what they were told, and when."""
    group = join(me)
    attach(group, "peer_memory", timeout=2.0, capacity=CAPACITY)
    victim = me.world - 1
    ones = torch.ones(300, WIDTH, device="cuda")
    assert tree_all_reduce(ones, group).unique().tolist() == [float(me.world)]
    tree_all_reduce_bf16(ones, group)  # compiled before the time-out counts
    torch.cuda.synchronize()
    dist.barrier()
    began = time.monotonic()
    result: list[Tensor] = []

    def step() -> None:
        with shared_fate():
            if me.rank == victim:
                _misbehave(what, group)
            result.append(tree_all_reduce_bf16(ones, group))
            torch.cuda.synchronize()

    said = _attempt(step)
    took = time.monotonic() - began
    if me.rank != victim:
        again = _attempt(lambda: tree_all_reduce(ones, group))
        assert again == said, (again, said)
        assert result[0].isnan().any(), "a sum that did not come about looks like one"
        Path(me.rendezvous).with_name(f"said{me.rank}").write_text(f"{took}\n{said}")
    time.sleep(4.0)  # a store lives as long as the processes that use it
    os._exit(0)


def _misbehave(what: str, group: ProcessGroup) -> None:
    if what == "error":
        raise ValueError("sample 1/2/3 has no tokens")
    if what == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leaves":
        detach(group)
    time.sleep(5.0)


def _attempt(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bits_are_those_of_the_cpus_tree(tmp_path: Path, ranks: int) -> None:
    found = run_ranks(__file__, "same_as_the_cpu", ranks, tmp_path)
    carriers = 3 + (torch.cuda.device_count() >= ranks)
    assert [r["carriers"].item() for r in found] == [carriers] * ranks


def test_this_data_tells_other_orders_apart() -> None:
    parts = [partial_of(r, 0, 256) for r in range(4)]
    difference = first_difference(((parts[0] + parts[1]) + parts[2]) + parts[3], balanced(4, 0, 256))
    assert difference is not None
    assert difference.count > 256


@pytest.mark.parametrize("ranks", [2, 4])
def test_graphs_and_eager_calls_take_turns(tmp_path: Path, ranks: int) -> None:
    run_ranks(__file__, "captured", ranks, tmp_path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_delays_change_nothing(tmp_path: Path, ranks: int) -> None:
    run_ranks(__file__, "delayed", ranks, tmp_path)


@pytest.mark.parametrize("what", ["error", "death", "late", "leaves"])
def test_trouble_of_one_rank_is_raised_by_name(tmp_path: Path, what: str) -> None:
    # every child ends without a result, so that none waits for the dead one
    with pytest.raises((RuntimeError, FileNotFoundError)):
        run_ranks(__file__, "troubled", 4, tmp_path, what)
    wanted = {"error": "ValueError: sample 1/2/3", "death": "ended before", "late": "did not reach", "leaves": "left"}
    for rank in range(3):
        took, said = (tmp_path / f"said{rank}").read_text().split("\n", 1)
        assert "rank 3 (process " in said
        assert wanted[what] in said
        assert float(took) < 10.0
