"""Short texts that the ranks of a group leave for each other in the store that the group was made with."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

# How the text of a rank begins that met no error of its own.
FOLLOWED = "gave up: "
_LONGEST = 1000


class Notices:
    """Where the process that kept the store is gone, nothing is left there and nothing found."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        """`name` is the same on every rank and new in the group, so that what was left before is not found."""
        self._store = dist.distributed_c10d._get_process_group_store(group)
        self._rank, self._ranks, self._name = group.rank(), group.size(), name

    def leave(self, kind: str, text: str) -> None:
        """Replaces what this rank left of this kind."""
        with suppress(RuntimeError):
            self._store.set(self._key(kind, self._rank), text[:_LONGEST])

    def found(self, kind: str) -> dict[int, str]:
        """What other ranks left of this kind; those whose error it was come before those that followed."""
        keys = {rank: self._key(kind, rank) for rank in range(self._ranks) if rank != self._rank}
        try:
            texts = {r: self._store.get(k).decode(errors="replace") for r, k in keys.items() if self._store.check([k])}
        except RuntimeError:
            return {}
        return dict(sorted(texts.items(), key=lambda left: left[1].startswith(FOLLOWED)))

    def _key(self, kind: str, rank: int) -> str:
        return f"samebits/{self._name}/{kind}/{rank}"
