"""Who carries the bytes of a group: by default torch.distributed, or what was attached to the group.

Every transport gives the same bits. `attach` is called once by all ranks, right after the group was made.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives.exchange import PeerExchange
from samebits.collectives.groups import require_power_of_two
from samebits.collectives.memory import HostMemory
from samebits.collectives.peers import CARD_BYTES, Card, Peers
from samebits.collectives.process_group import Fate, ProcessGroupTransport, carries, gather_bytes

TransportName = Literal["gloo", "shared_memory", "peer_memory"]
HOST_TRANSPORTS: tuple[TransportName, ...] = ("gloo", "shared_memory")
TRANSPORTS: tuple[TransportName, ...] = (*HOST_TRANSPORTS, "peer_memory")
CAPACITY = {"shared_memory": 1 << 20, "peer_memory": 32 << 20}
TIMEOUT = 600.0
_NUMBER = struct.Struct("<q")


class Transport(Protocol):
    """Moves bytes and adds fp32 values between the ranks of one group."""

    def gather(self, own: Tensor) -> Tensor:
        """uint8 [n] of every rank, in rank order: [ranks, n]."""

    def tree_sum(self, partial: Tensor) -> Tensor:
        """fp32, contiguous -> fp32 of the same shape: the balanced tree over ranks, on every rank."""

    def tree_sum_bf16(self, partial: Tensor, bias: Tensor | None) -> Tensor:
        """fp32 [..., c], contiguous, bias bf16 [c] -> bf16: the balanced tree over ranks plus bias, rounded once."""

    def tree_share(self, partial: Tensor) -> Tensor:
        """fp32 [ranks, n] on every rank -> [n]: this rank's row of the balanced tree over ranks."""

    def check(self) -> None:
        """Raise what a collective met since, where calls don't wait for it."""

    def fail(self, error: BaseException) -> None:
        """Tell every other rank about this error, so that it raises instead of waiting. The first error stays."""

    def close(self) -> None:
        """Leave the group."""


_attached: dict[dist.ProcessGroup, Transport] = {}
_numbers = itertools.count()


def transport_of(group: dist.ProcessGroup) -> Transport:
    """The transport attached to the group; without one, plain torch.distributed."""
    return _attached.get(group) or ProcessGroupTransport(group)


def attach(
    group: dist.ProcessGroup, transport: TransportName, timeout: float = TIMEOUT, capacity: int | None = None
) -> None:
    """Let `transport` serve the group from now on. All ranks call it with the same arguments; one rank needs none.

    "gloo" keeps torch.distributed and adds the failure rules: an error, a dead process and a time-out after
    `timeout` seconds reach every rank by name. "shared_memory" is for ranks of one host; two halves of `capacity`
    bytes per rank (default 1 MiB). "peer_memory" is for tensors on GPUs of one host, one rank or several on a card;
    larger payloads than `capacity` (default 32 MiB; four times as much is taken) go in pieces; tensors on the CPU
    still go through torch.distributed. Raises ValueError for another transport, for a number of ranks that no tree
    has, where there is no GPU for "peer_memory", and where the ranks don't share a host.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    if group in _attached:
        raise ValueError("this group has a transport already; detach it first")
    if transport == "peer_memory" and not torch.cuda.is_available():
        raise ValueError("peer_memory is for ranks with GPUs, and there is none here; use shared_memory or gloo")
    if group.size() == 1:
        return
    require_power_of_two(group.size(), "attach")
    if transport == "gloo":
        said = _cards(group, Card.own().to_bytes() + _NUMBER.pack(next(_numbers)))
        peers = Peers([Card.from_bytes(card[:CARD_BYTES]) for card in said], dist.get_process_group_ranks(group))
        _attached[group] = ProcessGroupTransport(group, Fate(group, peers, _name(said), timeout))
    elif transport == "shared_memory":
        _attached[group] = _share_memory(group, timeout, capacity or CAPACITY[transport])
    else:
        _attached[group] = _share_device_memory(group, timeout, capacity or CAPACITY[transport])


def detach(group: dist.ProcessGroup) -> None:
    """Leave the attached transport, if there is one."""
    transport = _attached.pop(group, None)
    if transport is not None:
        transport.close()


def check(group: dist.ProcessGroup) -> None:
    """Raise the CollectiveError that a collective of the group met on the device, as far as the device came.

    Calls on GPUs do not wait for their end. After a synchronisation, values are whole unless this raises.
    """
    transport_of(group).check()


@contextmanager
def shared_fate() -> Iterator[None]:
    """What this block raises, every other rank of every attached group raises too, naming this rank and its error.

    At its end the block raises what collectives on GPUs met, as far as the device came.
    """
    try:
        yield
        for transport in _attached.values():
            transport.check()
    except BaseException as error:
        # Also an error of one group: ranks that share only another group with this one would wait for it there.
        for transport in _attached.values():
            transport.fail(error)
        raise


def _share_memory(group: dist.ProcessGroup, timeout: float, capacity: int) -> PeerExchange:
    """Regions of all ranks, opened by every rank. The group carries who and where, and whether all went well."""
    memory = HostMemory(capacity)
    cards = _cards(group, Card.own().to_bytes() + memory.handle.to_bytes(8, "little"))
    peers = Peers([Card.from_bytes(card[:CARD_BYTES]) for card in cards], dist.get_process_group_ranks(group))
    hosts = sorted({card.host for card in peers.cards})
    problem = ""
    if len(hosts) > 1:
        problem = f"ranks run on {', '.join(hosts)}"
    else:
        try:
            memory.join(group.rank(), peers, [int.from_bytes(card[CARD_BYTES:], "little") for card in cards])
        except OSError as error:
            problem = f"rank {group.rank()} can't open another rank's memory: {error}"
    # Also the moment after which no rank needs another one's file any more.
    for found in _cards(group, problem.encode()[:512].ljust(512, b"\0")):
        if text := found.rstrip(b"\0").decode(errors="replace"):
            memory.close()
            peers.close()
            raise ValueError(f"shared_memory needs ranks that share a host: {text}; use the transport gloo")
    return PeerExchange(memory, peers, timeout)


def _share_device_memory(group: dist.ProcessGroup, timeout: float, capacity: int) -> Transport:
    """Regions on the cards of all ranks, opened by every rank."""
    # Triton, too, is only there where there are GPUs
    from samebits.collectives.device_memory import card_name, ipc_memory, symmetric_memory
    from samebits.collectives.peer_memory import PeerMemoryTransport, region_bytes
    from samebits.collectives.watch import Watch

    size = region_bytes(group.size(), capacity)
    device = torch.device("cuda", torch.cuda.current_device())
    said = _cards(group, Card.own().to_bytes() + _NUMBER.pack(next(_numbers)) + card_name(device))
    peers = Peers([Card.from_bytes(card[:CARD_BYTES]) for card in said], dist.get_process_group_ranks(group))
    hosts = sorted({card.host for card in peers.cards})
    if len(hosts) > 1:
        peers.close()
        raise ValueError(f"peer_memory needs ranks that share a host, they run on {', '.join(hosts)}; attach nothing")
    if len({card[CARD_BYTES + _NUMBER.size :] for card in said}) == len(said):
        memory = symmetric_memory(size, device, group)
    else:
        memory = ipc_memory(size, device, group.rank(), lambda own: _cards(group, own))
    watch = Watch(group, peers, _name(said), timeout)
    made = PeerMemoryTransport(group, memory, watch, capacity)
    torch.cuda.synchronize(device)
    _cards(group, b"ready")  # every region is open and zero
    return made


def _name(said: Sequence[bytes]) -> str:
    """A name of this attachment from what ranks said: a card, and how many groups the rank attached before."""
    (number,) = _NUMBER.unpack_from(said[0], CARD_BYTES)
    return f"{Card.from_bytes(said[0][:CARD_BYTES]).pid}-{number}"


def _cards(group: dist.ProcessGroup, own: bytes) -> list[bytes]:
    device = "cpu" if carries(group, "cpu") else "cuda"
    gathered = gather_bytes(torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device), group)
    return [row.cpu().numpy().tobytes() for row in gathered]
