"""AdamW on a card with moments in the host's memory: they visit the card in pieces, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

PIECE = 1 << 24  # elements: 64 MiB of each moment
_SLOTS = 3  # pieces on the card: one comes, one is worked on, one leaves


@dataclass(frozen=True)
class Part:
    """`count` elements of a parameter from `start` on, whose moments lie in a piece from `place` on."""

    parameter: Tensor
    start: int
    count: int
    place: int

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor that is laid out like the parameter."""
        return tensor.view(-1)[self.start : self.start + self.count]


@dataclass(frozen=True)
class Piece:
    """Both moments of some parts, fp32 [2, elements], in pinned memory where the parameters are on a card."""

    moments: Tensor
    parts: list[Part] = field(default_factory=list)


class HostMomentsAdamW(torch.optim.AdamW):
    """torch's fused AdamW over fp32 parameters, with the moments of `fraction` of their elements in host memory.

    Parameters are taken whole and in order until the fraction is reached. The kernel that updates them is the one
    that updates the others, element by element on the parameters' device, so bits do not depend on the fraction.
    Raises ValueError for a fraction outside [0, 1].
    """

    def __init__(self, groups: Sequence[dict[str, Any]], fraction: float, piece: int = PIECE) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"fraction must be in [0, 1], got {fraction}")
        super().__init__(groups, fused=True)
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, False
        self._steps = 0
        hosted = _first(self.param_groups, fraction)
        self._pieces = [(group, made) for group, members in hosted for made in _pieces(members, piece)]
        self._hosted = [parameter for _, members in hosted for parameter in members]
        devices = {parameter.device for parameter in self._hosted if parameter.is_cuda}
        self._card = _Card(devices.pop(), piece) if devices else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        aside = [parameter.grad for parameter in self._hosted]
        for parameter in self._hosted:
            parameter.grad = None
        loss = super().step(closure)
        for parameter, grad in zip(self._hosted, aside, strict=True):
            parameter.grad = grad
        self._steps += 1
        moments = self._card.visits if self._card is not None else _where_they_are
        for (group, piece), both in zip(self._pieces, moments([p for _, p in self._pieces]), strict=True):
            self._update(group, piece.parts, both)
        return loss

    def _update(self, group: Mapping[str, Any], parts: Sequence[Part], both: Tensor) -> None:
        ready = [(part, part.parameter.grad) for part in parts if part.parameter.grad is not None]
        first, second = ([both[row, part.place : part.place + part.count] for part, _ in ready] for row in (0, 1))
        adamw(
            [part.of(part.parameter) for part, _ in ready],
            [part.of(grad) for part, grad in ready],
            first,
            second,
            [],
            # the kernel adds one
            [torch.full((), self._steps - 1.0, device=both.device) for _ in ready],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _first(groups: Sequence[dict[str, Any]], fraction: float) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """The parameters, group by group, that hold at least this fraction of all elements, in order."""
    missing = fraction * sum(parameter.numel() for group in groups for parameter in group["params"])
    found = []
    for group in groups:
        members = []
        for parameter in group["params"]:
            if missing > 0:
                members.append(parameter)
                missing -= parameter.numel()
        found.append((group, members))
    return found


def _pieces(parameters: Sequence[Tensor], size: int) -> list[Piece]:
    """Pieces of up to `size` elements that hold the zeroed moments of the parameters, one behind the other."""
    left = sum(parameter.numel() for parameter in parameters)
    found: list[Piece] = []
    room = 0
    for parameter in parameters:
        start = 0
        while start < parameter.numel():
            if room == 0:
                room = min(size, left)
                found.append(Piece(torch.zeros(2, room, pin_memory=parameter.is_cuda)))
            count = min(room, parameter.numel() - start)
            found[-1].parts.append(Part(parameter, start, count, found[-1].moments.shape[1] - room))
            start, room, left = start + count, room - count, left - count
    return found


def _where_they_are(pieces: Sequence[Piece]) -> Iterator[Tensor]:
    return (piece.moments for piece in pieces)


class _Card:
    """Places on a card where moments stay while they are worked on, and the streams that bring and take them."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._slots = [torch.empty(2, size, device=device) for _ in range(_SLOTS)]
        self._left: list[torch.cuda.Event | None] = [None] * _SLOTS
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def visits(self, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        """The moments of each piece on the card, in turn; what was written there goes back to the host."""
        work = torch.cuda.current_stream(self._device)
        # also what the last step sent to the host
        self._in.wait_stream(work)
        for number, piece in enumerate(pieces):
            slot = number % _SLOTS
            here = self._slots[slot][:, : piece.moments.shape[1]]
            with torch.cuda.stream(self._in):
                left = self._left[slot]
                if left is not None:
                    self._in.wait_event(left)
                here.copy_(piece.moments, non_blocking=True)
            work.wait_stream(self._in)
            yield here
            self._out.wait_stream(work)
            with torch.cuda.stream(self._out):
                piece.moments.copy_(here, non_blocking=True)
                self._left[slot] = self._out.record_event()
        work.wait_stream(self._out)
