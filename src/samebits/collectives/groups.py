"""Facts about a process group that the moves and the trees rely on."""

from __future__ import annotations

import torch.distributed as dist


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; no group means one rank."""
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's place in the group; no group means place 0."""
    return 0 if group is None else group.rank()


def require_power_of_two(ranks: int, what: str) -> None:
    """A balanced tree over neighbouring ranks exists only for 1, 2, 4, ... ranks."""
    if ranks < 1 or ranks & (ranks - 1):
        raise ValueError(f"{what}: a tree over {ranks} ranks is not balanced; use a power of two (1, 2, 4, 8, ...)")
