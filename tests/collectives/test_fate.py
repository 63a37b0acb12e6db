"""Groups of real processes in which one rank errs, dies or does not come: all others raise, and name it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import fork_ranks

from samebits.collectives import HOST_TRANSPORTS, attach, detach, gather_states, shared_fate, tree_all_reduce

VICTIM = 2


def join(rank: int, ranks: int, file: Path) -> dist.ProcessGroup:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    dist.barrier()  # so that nobody leaves while another one still connects
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def attempt(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


def _misbehave(what: str) -> None:
    if what == "error":
        raise ValueError("sample 1/2/3 has no tokens")
    if what == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3.0)


@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
@pytest.mark.parametrize("what", ["error", "death", "late"])
def test_one_ranks_trouble_is_raised_by_name_on_every_rank(tmp_path: Path, transport: str, what: str) -> None:
    def program(rank: int, pids: list[int]) -> tuple[list[float], str, str]:
        group = join(rank, 4, tmp_path / "rendezvous")
        attach(group, transport, timeout=1.5 if what == "late" else 60.0)  # type: ignore[arg-type]
        total = tree_all_reduce(torch.ones(256), group)

        def troubled() -> None:
            with shared_fate():
                if rank == VICTIM:
                    _misbehave(what)
                tree_all_reduce(torch.ones(256), group)

        error = attempt(troubled)
        again = attempt(lambda: gather_states(torch.ones(1), group))
        if rank != VICTIM and what == "late":
            time.sleep(3.0)  # a store lives as long as the processes that use it
        detach(group)
        return total.unique().tolist(), error, again

    outcomes = fork_ranks(4, program)
    assert [o.error for o in outcomes] == [""] * 4
    wanted = {"error": "ValueError: sample 1/2/3 has no tokens", "death": "ended before", "late": "did not reach"}
    for outcome in (o for rank, o in enumerate(outcomes) if rank != VICTIM):
        total, error, again = outcome.value
        assert total == [4.0]
        assert f"rank {VICTIM} (process " in error
        assert error.startswith("RankFailed: " if what == "error" else ("RankLost: ", "RankLate: ", "RankFailed: "))
        assert wanted[what] in error
        assert again, "the group could still be used"
        assert outcome.seconds < 10.0
    if what == "death":
        assert outcomes[VICTIM].signal == signal.SIGKILL
        return
    _, error, again = outcomes[VICTIM].value
    if what == "error":
        assert error == wanted[what]
    assert again.startswith("RankFailed: ")


@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
def test_trouble_in_one_group_reaches_the_ranks_of_another(tmp_path: Path, transport: str) -> None:
    def program(rank: int, pids: list[int]) -> str:
        world = join(rank, 4, tmp_path / "rendezvous")
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        attach(world, transport, timeout=60.0)  # type: ignore[arg-type]
        attach(pairs[rank // 2], transport, timeout=0.5)  # type: ignore[arg-type]

        def step() -> None:
            with shared_fate():
                if rank == 3:
                    time.sleep(2.0)
                tree_all_reduce(torch.ones(4), pairs[rank // 2])
                tree_all_reduce(torch.ones(4), world)

        error = attempt(step)
        time.sleep(2.0)  # a store lives as long as the processes that use it
        return error

    outcomes = fork_ranks(4, program)
    assert [o.error for o in outcomes] == [""] * 4
    assert outcomes[2].value.startswith("RankLate: rank 3 (process ")
    for rank in (0, 1):
        assert outcomes[rank].value.startswith("RankFailed: rank ")
        assert "RankLate: rank 3 (process " in outcomes[rank].value
        assert outcomes[rank].seconds < 20.0


@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
def test_how_far_ranks_came_in_an_earlier_attachment_does_not_count(tmp_path: Path, transport: str) -> None:
    def program(rank: int, pids: list[int]) -> str:
        group = join(rank, 2, tmp_path / "rendezvous")
        attach(group, transport, timeout=60.0)  # type: ignore[arg-type]
        for turn in range(3):
            if turn == rank:
                time.sleep(0.3)  # so that the other one looks around, and says where it waits
            gather_states(torch.ones(1), group)
        detach(group)
        attach(group, transport, timeout=0.3)  # type: ignore[arg-type]
        if rank == 1:
            time.sleep(1.0)
        error = attempt(lambda: gather_states(torch.ones(1), group))
        time.sleep(1.0)  # a store lives as long as the processes that use it
        return error

    outcomes = fork_ranks(2, program)
    assert [o.error for o in outcomes] == [""] * 2
    assert outcomes[0].value.startswith("RankLate: rank 1 (process "), outcomes[0]


def test_the_end_of_the_rank_that_kept_the_store_is_named(tmp_path: Path) -> None:
    def program(rank: int, pids: list[int]) -> str:
        file = tmp_path / "port"
        keeper = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False) if rank == 0 else None
        if keeper is not None:
            file.with_suffix(".new").write_text(str(keeper.port))
            file.with_suffix(".new").rename(file)
        while not file.exists():
            time.sleep(0.01)
        store = keeper or dist.TCPStore("127.0.0.1", int(file.read_text()), 2, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        group = dist.group.WORLD
        assert group is not None
        attach(group, "gloo", timeout=20.0)
        gather_states(torch.ones(1), group)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt(lambda: gather_states(torch.ones(1), group))

    outcomes = fork_ranks(2, program)
    assert outcomes[1].value.startswith("RankLost: rank 0 (process "), outcomes[1]


def test_three_ranks_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    def program(rank: int, pids: list[int]) -> list[str]:
        group = join(rank, 3, tmp_path / "rendezvous")
        return [
            *(attempt(lambda t=t: attach(group, t)) for t in (*HOST_TRANSPORTS, "telepathy")),  # type: ignore[misc]
            attempt(lambda: tree_all_reduce(torch.ones(3), group)),
        ]

    rule = "a tree over 3 ranks is not balanced; use a power of two (1, 2, 4, 8, ...)"
    outcomes = fork_ranks(3, program)
    assert [o.error for o in outcomes] == [""] * 3
    for outcome in outcomes:
        assert outcome.value == [
            f"ValueError: attach: {rule}",
            f"ValueError: attach: {rule}",
            "ValueError: transport must be one of gloo, shared_memory, peer_memory, got 'telepathy'",
            f"ValueError: tree_all_reduce: {rule}",
        ]
