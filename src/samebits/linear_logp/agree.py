"""One decision on all ranks: what each rank says about itself, told to every other one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.distributed as dist

from samebits.collectives import gather_states
from samebits.contract import canonical_json

_BYTES = 2048  # one fixed size, so that no rank has to announce its own
_LONGEST_DETAIL = 800

Status = Literal["served", "unavailable", "failed"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a call went on one rank. `values` names the scores by their bits, `replica` whom they must agree with."""

    status: Status
    detail: str = ""
    settings: str = ""
    backend: str = ""
    contract: str = ""
    replica: str = ""
    values: str = ""

    @classmethod
    def of(cls, status: Status, error: BaseException) -> Verdict:
        return cls(status=status, detail=f"{type(error).__name__}: {error}"[:_LONGEST_DETAIL])


def exchange(own: Verdict, group: dist.ProcessGroup | None, device: torch.device) -> list[Verdict]:
    """Every rank's verdict, in rank order. All ranks of the group must call it, equally often."""
    if group is None or group.size() == 1:
        return [own]
    text = canonical_json(asdict(own)).encode()
    if len(text) > _BYTES:
        text = canonical_json(asdict(own) | {"detail": own.detail.encode("ascii", "replace").decode()[:200]}).encode()
    padded = torch.frombuffer(bytearray(text.ljust(_BYTES)), dtype=torch.uint8).to(device)
    return [Verdict(**json.loads(row.cpu().numpy().tobytes())) for row in gather_states(padded, group)]


def first(verdicts: list[Verdict], status: Status) -> str | None:
    """`rank r: detail` of the first rank with this status."""
    return next((f"rank {rank}: {v.detail}" for rank, v in enumerate(verdicts) if v.status == status), None)


def disagreement(verdicts: list[Verdict], fields: tuple[str, ...]) -> str | None:
    """The first of `fields` in which ranks differ, as a sentence; scores are compared inside their replica only."""
    for name in fields:
        seen: dict[str, tuple[int, str]] = {}
        for rank, verdict in enumerate(verdicts):
            scope, value = verdict.replica if name == "values" else "", getattr(verdict, name)
            other, first_value = seen.setdefault(scope, (rank, value))
            if value != first_value:
                return f"ranks disagree about {name}: rank {other} says {first_value!r}, rank {rank} says {value!r}"
    return None
