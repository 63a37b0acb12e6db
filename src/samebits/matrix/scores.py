"""Log-probability bits of one layout on the tokens that all layouts share, and how two of them compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from samebits.contract import digest_of
from samebits.evidence.compare import Comparison, compare
from samebits.timeline.types import Rollout, SampleKey, TrainSample


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one layout said about each sample: its response tokens and one fp32 bit pattern for each.

    `steps` holds loss, gradient norm and what the weights are after each optimiser step (trainers only).
    """

    tokens: Mapping[str, Sequence[int]]
    bits: Mapping[str, Sequence[int]]
    processes: int
    seconds: float
    steps: Sequence[Mapping[str, Any]] = field(default=())

    def digest(self) -> str:
        """The name of all tokens and all bits, in the order of the samples."""
        return digest_of([[key, list(self.tokens[key]), list(self.bits[key])] for key in sorted(self.bits)])

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Scores:
        return cls(**data)


def of_rollouts(rollouts: Sequence[Rollout], processes: int, seconds: float) -> Scores:
    """What rollout engines said."""
    return Scores(
        tokens={str(one.key): one.token_ids for one in rollouts},
        bits={str(one.key): one.logp_bits for one in rollouts},
        processes=processes,
        seconds=seconds,
    )


def samples_of(rollouts: Sequence[Rollout]) -> list[TrainSample]:
    """The recorded responses as a trainer receives them, with advantages that are not all alike."""
    return [
        TrainSample(
            key=one.key,
            token_ids=(*one.prompt_ids, *one.token_ids),
            prompt_length=len(one.prompt_ids),
            advantage=math.sin(1.0 + index),
            rollout_logp_bits=one.logp_bits,
            rollout_contract=one.contract,
        )
        for index, one in enumerate(rollouts)
    ]


def merge_ranks(ranks: Sequence[Mapping[SampleKey, Sequence[int]]], samples: Sequence[TrainSample]) -> dict[str, Any]:
    """What the ranks of one trainer scored, by sample. Raises ValueError where two disagree or none answered."""
    merged: dict[str, Any] = {}
    for rank, scored in enumerate(ranks):
        for key, bits in scored.items():
            if merged.setdefault(str(key), bits) != bits:
                raise ValueError(f"trainer rank {rank} computed other log-probabilities for sample {key}")
    for sample in samples:
        found, wanted = len(merged.get(str(sample.key), ())), sample.response_length
        if found != wanted:
            raise ValueError(f"sample {sample.key}: the trainer scored {found} of {wanted} tokens")
    return merged


def compare_layouts(trainer: Scores, rollout: Scores) -> Comparison:
    """Token by token. Where a rollout layout drew another token, it has no score for the trainer's: a mismatch."""
    return compare(
        (key, _aligned(rollout, trainer.tokens[key], key), bits) for key, bits in sorted(trainer.bits.items())
    )


_QUIET_NAN = 0x7FC00000


def _aligned(rollout: Scores, tokens: Sequence[int], key: str) -> list[int]:
    """The rollout's bits for exactly these tokens; a pattern that no log-probability has, where it drew others."""
    drawn, bits = list(rollout.tokens.get(key, ())), rollout.bits.get(key, ())
    same = 0
    while same < len(tokens) and same < len(drawn) and drawn[same] == tokens[same]:
        same += 1
    return [*bits[:same], *([_QUIET_NAN] * (len(tokens) - same))]
