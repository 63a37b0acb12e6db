"""Collectives over a `torch.distributed` process group: it moves bytes, the adding is ours.

With a `Fate` the ranks share theirs: a rank that fails leaves a notice, and the others look for one while they wait.
Without, a call waits as torch.distributed does. GPU tensors of a group that has no NCCL (or RCCL), as
when ranks share a card, go through the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives.errors import CollectiveError, RankFailed, RankLate, RankLost
from samebits.collectives.fold import fold_stacked
from samebits.collectives.notices import FOLLOWED, Notices
from samebits.collectives.peers import Peers

# Seconds after which a rank that still waits begins to look at the store, and then between two looks.
PATIENCE = 0.1
_SHORTEST, _LONGEST = 20e-6, 2e-3
# On a GPU, larger sums are added in shares: fewer bytes for a second exchange.
_SHARED_BYTES = 256 * 1024
# torch 2.13 deprecates the older name, earlier releases have no other.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_bytes(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """uint8 [n] of every rank, in rank order: [ranks, n]. Every backend carries bytes and has no opinion about them."""
    out = torch.empty((group.size(), own.numel()), dtype=torch.uint8, device=own.device)
    _all_gather(out.view(-1), own, group=group)
    return out


def carries(group: dist.ProcessGroup, device: str) -> bool:
    """Whether the group moves tensors of `device` ("cpu" or "cuda") itself; gloo is taken as the host's only."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return device in backends and not (device == "cuda" and backends[device] == "gloo")


class ProcessGroupTransport:
    """Any torch.distributed backend as a mover of bytes."""

    def __init__(self, group: dist.ProcessGroup, fate: Fate | None = None) -> None:
        self._group, self._fate = group, fate

    def gather(self, own: Tensor) -> Tensor:
        if self._through_host(own):
            return self.gather(own.cpu()).to(own.device)
        if self._fate is None:
            return gather_bytes(own, self._group)
        out = torch.empty((self._group.size(), own.numel()), dtype=torch.uint8, device=own.device)
        self._fate.run(lambda: _all_gather(out.view(-1), own, group=self._group, async_op=True))
        return out

    def tree_sum(self, partial: Tensor) -> Tensor:
        return self._sum(partial, None, torch.float32)

    def tree_sum_bf16(self, partial: Tensor, bias: Tensor | None) -> Tensor:
        return self._sum(partial, bias, torch.bfloat16)

    def tree_share(self, partial: Tensor) -> Tensor:
        return fold_stacked(self._exchange(partial))

    def _sum(self, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ranks, columns = self._group.size(), 1 if bias is None else bias.numel()
        if partial.is_cuda and 4 * partial.numel() > _SHARED_BYTES and partial.numel() % (ranks * columns) == 0:
            own = fold_stacked(self._exchange(partial.view(ranks, -1)), bias, dtype)
            return self.gather(own.view(torch.uint8)).view(-1).view(dtype).view(partial.shape)
        gathered = self.gather(partial.view(-1).view(torch.uint8)).view(-1).view(torch.float32)
        return fold_stacked(gathered.view(ranks, partial.numel()), bias, dtype).view(partial.shape)

    def _exchange(self, rows: Tensor) -> Tensor:
        """Row r of every rank's [ranks, n] on rank r: [ranks, n]."""
        if self._through_host(rows):
            return self._exchange(rows.cpu()).to(rows.device)
        received = torch.empty_like(rows)
        if self._fate is None:
            dist.all_to_all_single(received, rows, group=self._group)
        else:
            self._fate.run(lambda: dist.all_to_all_single(received, rows, group=self._group, async_op=True))
        return received

    def _through_host(self, x: Tensor) -> bool:
        return x.is_cuda and not carries(self._group, "cuda")

    def check(self) -> None:
        """Nothing: what goes wrong is raised by the call itself."""

    def fail(self, error: BaseException) -> None:
        if self._fate is not None:
            self._fate.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._fate is not None:
            self._fate.close()


class Fate:
    """What ranks tell each other outside of collectives."""

    def __init__(self, group: dist.ProcessGroup, peers: Peers, name: str, timeout: float) -> None:
        """`name` is the same on every rank and new in the group; `timeout` is how many seconds a rank waits."""
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.timeout = timeout
        self._rank, self._ranks, self._peers = group.rank(), group.size(), peers
        self._notices = Notices(group, name)
        self._count = self._said_to_wait = 0
        self._broken: CollectiveError | None = None

    def run(self, begin: Callable[[], Any]) -> None:
        """Begin one collective and wait for it, for an error of another rank, for its end, or for the time-out."""
        if self._broken is not None:
            raise self._broken
        self._count += 1
        started, delay, look = time.monotonic(), _SHORTEST, PATIENCE
        try:
            work = begin()
            while not work.is_completed():
                time.sleep(delay)
                delay = min(2 * delay, _LONGEST)
                waited = time.monotonic() - started
                if waited > look:
                    look = waited + PATIENCE
                    self._look_around(waited)
            work.wait()
        except CollectiveError:
            raise
        except RuntimeError as error:
            self._explain(error)

    def fail(self, text: str) -> None:
        """Leave word of this rank's own error; the first one stays."""
        if self._broken is None:
            self._broken = RankFailed(f"this rank met an error before: {text}")
            self._notices.leave("failed", text)

    def close(self) -> None:
        self._peers.close()

    def _look_around(self, waited: float) -> None:
        if self._said_to_wait < self._count:
            self._said_to_wait = self._count
            self._notices.leave("waits", str(self._count))
        for rank, said in self._notices.found("failed").items():
            self._raise(RankFailed(f"{self._peers.name(rank)} failed before collective {self._count}: {said}"))
        for rank in range(self._ranks):
            if rank != self._rank and self._peers.ended(rank):
                self._raise(RankLost(f"{self._peers.name(rank)} ended before collective {self._count}"))
        if waited > self.timeout:
            self._raise_late()

    def _raise_late(self) -> None:
        waits = self._notices.found("waits")
        here = [r for r in range(self._ranks) if r == self._rank or int(waits.get(r, 0)) >= self._count]
        late = ", ".join(self._peers.name(rank) for rank in range(self._ranks) if rank not in here)
        text = f"{late or 'a rank'} did not reach collective {self._count} within {self.timeout:g} s"
        came = ", ".join(str(self._peers.numbers[rank]) for rank in here)
        self._raise(RankLate(f"{text}; ranks that did: {came}"))

    def _explain(self, error: RuntimeError) -> None:
        """torch.distributed gave up: say which rank it was about. A death takes a moment to show."""
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            self._look_around(0.0)
            time.sleep(0.02)
        self._raise(RankLost(f"collective {self._count}: {error}"), error)

    def _raise(self, error: CollectiveError, cause: BaseException | None = None) -> None:
        self._broken = error
        self._notices.leave("failed", f"{FOLLOWED}{error}")
        raise error from cause
