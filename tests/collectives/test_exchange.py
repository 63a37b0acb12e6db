"""Shared memory between ranks: right bits under delays and deaths at every point, and faults that would show."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from forked import Outcome, Watched, partial_of, run_forked
from torch import Tensor

from samebits.bits import digest
from samebits.collectives import exchange as exchange_module
from samebits.collectives import fold_neighbours
from samebits.collectives.exchange import SMALL_BYTES, PeerExchange
from samebits.collectives.memory import POSTED

COUNT = 256
POINTS = [f"{when} {name}" for name in Watched.POINTS for when in ("before", "after")]


def expected(ranks: int, turn: int, count: int = COUNT) -> Tensor:
    return fold_neighbours([partial_of(rank, turn, count) for rank in range(ranks)])


def sums(turns: int, count: int = COUNT) -> Callable[[PeerExchange, int], list[str]]:
    """A program of so many tree sums; it returns the digest of each."""

    def program(group: PeerExchange, rank: int) -> list[str]:
        return [digest(group.tree_sum(partial_of(rank, turn, count))) for turn in range(turns)]

    return program


def digests(ranks: int, turns: int, count: int = COUNT) -> list[str]:
    return [digest(expected(ranks, turn, count)) for turn in range(turns)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sums_shares_and_gathers_of_every_size(ranks: int) -> None:
    # below, at and above one round, one half and the line between the two forms, none a multiple of the ranks
    counts = [0, 1, 255, 1024, 1025, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 10_007]

    def program(group: PeerExchange, rank: int) -> list[list[str]]:
        found = []
        for count in counts:
            own = partial_of(rank, 0, count * ranks)
            found.append(
                [
                    digest(group.tree_sum(own[:count])),
                    digest(group.tree_share(own.view(ranks, count))),
                    digest(group.gather(own.view(torch.uint8))),
                ]
            )
        group.close()
        return found

    outcomes = run_forked(ranks, program)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == ""
        for count, found in zip(counts, outcome.value, strict=True):
            parts = [partial_of(r, 0, count * ranks) for r in range(ranks)]
            assert found == [
                digest(fold_neighbours([p[:count] for p in parts])),
                digest(fold_neighbours(parts).view(ranks, count)[rank].contiguous()),
                digest(torch.stack(parts).view(torch.uint8)),
            ], f"{count} values on rank {rank} of {ranks}"


def delays(seconds: float) -> Callable[[int], Callable[[str], None]]:
    """Each rank in turn is slow at each point in turn: one (rank, point) for three turns, then the next."""

    def at(rank: int) -> Callable[[str], None]:
        posts = 0

        def pause(point: str) -> None:
            nonlocal posts
            posts += point == "before announce"
            place = (posts // 3) % (4 * len(POINTS))
            if divmod(place, len(POINTS)) == (rank, POINTS.index(point)):
                time.sleep(seconds)

        return pause

    return at


TURNS = 3 * 4 * len(POINTS)


def test_a_slow_rank_at_any_point_changes_nothing() -> None:
    outcomes = run_forked(4, sums(TURNS), at=delays(0.004))
    assert [o.error for o in outcomes] == [""] * 4
    wanted = digests(4, TURNS)
    assert all(outcome.value == wanted for outcome in outcomes)


class NoGenerationCheck(PeerExchange):
    """Fault: goes on without waiting for the others' posts."""

    def _await_posts(self, generation: int, kind: int) -> None:
        pass


class EarlyOverwrite(PeerExchange):
    """Fault: one half only, so that a payload is overwritten while another rank still reads it."""

    def _half(self, generation: int) -> int:
        return 0


class PostFirst(PeerExchange):
    """Fault: the generation is posted before the payload is there."""

    def _look_around(self, generation: int, kind: int) -> None:
        super()._look_around(generation, kind)
        if self._memory.word(self.rank, POSTED) < generation:
            self._memory.announce(self._half(generation), (kind, 4 * COUNT, generation))
            self._memory.set_word(POSTED, generation)


def is_caught(outcomes: Sequence[Outcome], wanted: list[str]) -> bool:
    return any(outcome.error or outcome.value != wanted for outcome in outcomes)


@pytest.mark.parametrize("fault", [NoGenerationCheck, EarlyOverwrite, PostFirst])
def test_a_broken_protocol_is_caught_under_the_same_delays(fault: type[PeerExchange]) -> None:
    outcomes = run_forked(4, sums(TURNS), at=delays(0.004), exchange=fault, timeout=5.0)
    assert is_caught(outcomes, digests(4, TURNS))


def chain(parts: Sequence[Tensor]) -> Tensor:
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = total + part
    return total


def far_pairs(parts: Sequence[Tensor]) -> Tensor:
    level = list(parts)
    while len(level) > 1:
        half = len(level) // 2
        level = [level[i] + level[i + half] for i in range(half)]
    return level[0]


@pytest.mark.parametrize("order", [chain, far_pairs])
@pytest.mark.parametrize("count", [COUNT, SMALL_BYTES])
def test_another_tree_is_caught(
    order: Callable[[Sequence[Tensor]], Tensor], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "fold_neighbours", order)
    assert is_caught(run_forked(4, sums(1, count)), digests(4, 1, count))


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_killed_at_any_point_is_named_and_corrupts_nothing(point: str) -> None:
    def at(rank: int) -> Callable[[str], None]:
        seen = 0

        def die(here: str) -> None:
            nonlocal seen
            seen += here == "before announce"
            if rank == 2 and seen >= 2 and here == point:
                os.kill(os.getpid(), signal.SIGKILL)

        return die

    def program(group: PeerExchange, rank: int) -> list[str]:
        found: list[str] = []
        try:
            for turn in range(4):
                found.append(digest(group.tree_sum(partial_of(rank, turn, COUNT))))
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
        return found

    outcomes = run_forked(4, program, at=at)
    assert outcomes[2].signal == signal.SIGKILL
    wanted = digests(4, 4)
    for rank in (0, 1, 3):
        *completed, last = outcomes[rank].value
        assert completed == wanted[: len(completed)]
        assert last.startswith(("RankLost: rank 2 ", "RankFailed: rank "))
        assert "rank 2 (process" in last
        assert "ended before collective round" in last
        assert outcomes[rank].seconds < 10.0


def outcome_of_errors(outcomes: Sequence[Outcome], rank: int) -> list[str]:
    return [outcome.error for at, outcome in enumerate(outcomes) if at != rank]


def test_an_error_before_a_collective_is_raised_by_every_rank() -> None:
    def program(group: PeerExchange, rank: int) -> None:
        group.tree_sum(partial_of(rank, 0, COUNT))
        if rank == 3:
            error = ValueError("sample 1/2/3 has no tokens")
            group.fail(error)
            raise error
        group.tree_sum(partial_of(rank, 1, COUNT))

    outcomes = run_forked(4, program)
    assert outcomes[3].error == "ValueError: sample 1/2/3 has no tokens"
    for error in outcome_of_errors(outcomes, 3):
        assert error.startswith("RankFailed: rank 3 (process")
        assert error.endswith("failed before collective round 2 (tree sum): ValueError: sample 1/2/3 has no tokens")
    assert max(o.seconds for o in outcomes) < 10.0


def test_a_late_rank_is_named_and_raises_when_it_comes() -> None:
    def program(group: PeerExchange, rank: int) -> None:
        group.tree_sum(partial_of(rank, 0, COUNT))
        if rank == 1:
            time.sleep(2.0)
        group.tree_sum(partial_of(rank, 1, COUNT))

    outcomes = run_forked(4, program, timeout=0.5)
    errors = outcome_of_errors(outcomes, 1)
    assert any(e.startswith("RankLate: rank 1 (process") and "ranks that did: 0, 2, 3" in e for e in errors), errors
    assert all("did not reach collective round 2 (tree sum) within 0.5 s" in error for error in errors)
    assert outcomes[1].error.startswith("RankFailed: rank 0 (process")


def test_a_rank_that_leaves_early_is_named_and_what_it_posted_stays_readable() -> None:
    def program(group: PeerExchange, rank: int) -> list[str]:
        found = [digest(group.tree_sum(partial_of(rank, turn, COUNT))) for turn in range(2)]
        if rank == 0:
            group.close()
            return found
        time.sleep(0.1 * rank)
        try:
            group.tree_sum(partial_of(rank, 2, COUNT))
        except RuntimeError as error:
            found.append(str(error))
        return found

    outcomes = run_forked(4, program)
    wanted = digests(4, 2)
    assert outcomes[0].value == wanted
    for outcome in outcomes[1:]:
        assert outcome.value[:2] == wanted
        assert "rank 0 (process" in outcome.value[2]
        assert "left the group before collective round 3" in outcome.value[2]


def test_closing_waits_for_the_slowest_reader() -> None:
    def at(rank: int) -> Callable[[str], None]:
        def pause(point: str) -> None:
            if rank == 1 and point == "before announced":
                time.sleep(0.2)

        return pause

    def program(group: PeerExchange, rank: int) -> float:
        group.tree_sum(partial_of(rank, 0, COUNT))
        began = time.monotonic()
        group.close()
        return time.monotonic() - began

    outcomes = run_forked(2, program, at=at)
    assert outcomes[0].value > 0.2


def test_ranks_that_call_different_things_all_say_so() -> None:
    def program(group: PeerExchange, rank: int) -> None:
        if rank == 1:
            group.gather(torch.zeros(64, dtype=torch.uint8))
        else:
            group.tree_sum(torch.zeros(COUNT))

    outcomes = run_forked(4, program)
    for outcome in outcomes:
        assert "rank 0 calls tree sum of 1024 bytes in its round 1; rank 1 calls gather of 64 bytes" in outcome.error


@pytest.mark.parametrize("point", ["after payload", "after set_word", "after wait_word", "after announced"])
def test_who_left_a_round_half_way_does_not_come_back(point: str) -> None:
    """The next sum would have what the others added before."""

    def at(rank: int) -> Callable[[str], None]:
        seen = iter([rank == 0])

        def interrupted(here: str) -> None:
            if here == point and next(seen, False):
                raise OSError("interrupted")

        return interrupted

    def program(group: PeerExchange, rank: int) -> list[Any]:
        found: list[Any] = []
        for values in (1.0, 100.0):
            try:
                found.append(group.tree_sum(torch.full((4,), values * (rank + 1))).tolist())
            except (OSError, RuntimeError) as error:
                found.append(str(error))
            time.sleep(0.2)  # so that a sum that comes about does so before the other rank is gone
        return found

    first, second = (outcome.value for outcome in run_forked(2, program, at=at))
    assert first[0] == "interrupted"
    assert "this rank met an error before: OSError: interrupted" in first[1]
    assert "OSError: interrupted" in second[1]


def test_after_a_failure_the_group_stays_broken() -> None:
    def program(group: PeerExchange, rank: int) -> list[str]:
        errors = []
        group.tree_sum(torch.zeros(4))  # everyone is there before the first is gone
        if rank == 0:
            group.fail(OSError("disk full"))
        for _ in range(2):
            try:
                group.tree_sum(torch.zeros(4))
            except RuntimeError as error:
                errors.append(str(error))
        return errors

    outcomes = run_forked(2, program)
    assert all(len(outcome.value) == 2 and "OSError: disk full" in outcome.value[1] for outcome in outcomes)
