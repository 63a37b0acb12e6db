"""The host's watch over waiting kernels, with the words that a kernel would write: who is named, and when nobody is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from forked import fork_ranks

from samebits.collectives import CollectiveError
from samebits.collectives.peers import Card, Peers
from samebits.collectives.watch import Watch

VICTIM = 2


def watched(directory: Path, timeout: float, program: Callable[[Watch, int], object]) -> Callable[..., object]:
    """A rank with a watch, whose program plays the kernels."""

    def run(rank: int, pids: list[int]) -> object:
        dist.init_process_group("gloo", init_method=f"file://{directory / 'rendezvous'}", rank=rank, world_size=3)
        dist.barrier()
        assert dist.group.WORLD is not None
        watch = Watch(dist.group.WORLD, Peers([Card(Card.own().host, pid) for pid in pids]), "test", timeout)
        return program(watch, rank)

    return run


def wait_for(watch: Watch, rank: int, generations: Callable[[float], int], seconds: float) -> str:
    """A kernel that waits for `rank` in generation `generations(seconds so far)`; the error that ended it, if any."""
    began = time.monotonic()
    while (took := time.monotonic() - began) < seconds and not watch.words[0]:
        watch.words[1 + rank] = generations(took) + 1
        time.sleep(0.01)
    try:
        watch.check()
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("what", ["error", "death", "late", "leaves"])
def test_the_rank_that_is_missing_is_named(tmp_path: Path, what: str) -> None:
    def program(watch: Watch, rank: int) -> str:
        if rank == VICTIM:
            if what == "error":
                watch.fail(ValueError("sample 1/2/3 has no tokens"))
            elif what == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "leaves":
                watch.close()
            time.sleep(1.5)
            return ""
        return wait_for(watch, VICTIM, lambda _: 7, 10.0)

    outcomes = fork_ranks(3, watched(tmp_path, 0.5 if what == "late" else 60.0, program))
    wanted = {
        "error": ("RankFailed", "ValueError: sample 1/2/3"), "death": ("RankLost", "ended before"),
        "late": ("RankLate", "did not reach"), "leaves": ("RankLost", "left the group"),
    }[what]  # fmt: skip
    for outcome in outcomes[:VICTIM]:
        assert outcome.error == ""
        # a rank may hear of the other one's time-out first
        assert outcome.value.startswith((wanted[0], "RankFailed"))
        assert f"rank {VICTIM} (process " in outcome.value
        assert wanted[1] in outcome.value
        assert outcome.seconds < 5.0


def test_many_short_waits_are_no_long_one(tmp_path: Path) -> None:
    def program(watch: Watch, rank: int) -> str:
        if rank == 0:
            return wait_for(watch, 1, lambda took: int(took / 0.2), 1.2)
        time.sleep(1.5)
        return ""

    assert [o.value for o in fork_ranks(3, watched(tmp_path, 0.5, program))] == ["", "", ""]


def test_a_wait_that_ended_names_nobody(tmp_path: Path) -> None:
    def program(watch: Watch, rank: int) -> str:
        if rank == VICTIM:
            time.sleep(1.5)
            return ""
        wait_for(watch, 1 - rank, lambda _: 7, 0.3)
        return wait_for(watch, VICTIM, lambda _: 7, 10.0)

    for outcome in fork_ranks(3, watched(tmp_path, 0.5, program))[:VICTIM]:
        assert f"rank {VICTIM} (process " in outcome.value
        assert outcome.value.endswith("did not reach a collective on the device within 0.5 s")
        assert all(f"rank {other} (" not in outcome.value.split("gave up: ")[-1] for other in range(VICTIM))


@pytest.mark.parametrize("what", ["death", "leaves"])
def test_a_rank_that_goes_after_the_wait_for_it_is_not_missed(tmp_path: Path, what: str) -> None:
    def program(watch: Watch, rank: int) -> str:
        if rank != VICTIM:
            wait_for(watch, VICTIM, lambda _: 7, 0.4)
        dist.barrier()
        if rank == VICTIM:
            if what == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            watch.close()
            return ""
        time.sleep(1.5)
        return wait_for(watch, VICTIM, lambda _: 8, 0.0)

    assert [outcome.value for outcome in fork_ranks(3, watched(tmp_path, 60.0, program))[:VICTIM]] == ["", ""]


def test_what_a_rank_met_itself_stays(tmp_path: Path) -> None:
    def program(watch: Watch, rank: int) -> list[str]:
        watch.fail(ValueError("mine"))
        watch.fail(ValueError("later"))
        found = [wait_for(watch, (rank + 1) % 3, lambda _: 1, 0.3)]
        watch.close()
        return [*found, wait_for(watch, 0, lambda _: 1, 0.1)]

    said = "RankFailed: this rank met an error before: ValueError: mine"
    assert [o.value for o in fork_ranks(3, watched(tmp_path, 60.0, program))] == [[said, said]] * 3
