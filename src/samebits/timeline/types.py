"""The nouns of a run: which sample, which step, which weights. Plain data, standard library only.

Log-probabilities travel as the unsigned 32-bit patterns of their fp32 values, so that no conversion
between the engine that reported a value and the record that holds it can change it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, order=True)
class SampleKey:
    """The stable name of one response: comparisons and random draws depend on it, never on batch order."""

    step: int
    prompt: int
    sample: int

    def __str__(self) -> str:
        return f"{self.step}/{self.prompt}/{self.sample}"


@dataclass(frozen=True)
class WeightVersion:
    """A published set of weights: a counter that only grows, and the digest of what was published."""

    counter: int
    digest: str

    def __str__(self) -> str:
        return f"v{self.counter}:{self.digest[:12]}"


@dataclass(frozen=True)
class Prompt:
    """One problem: its index in the prompt file, its token ids, the expected answer and the source text."""

    index: int
    token_ids: tuple[int, ...]
    label: str
    text: str


@dataclass(frozen=True)
class GenerateRequest:
    """What a rollout engine is asked for: one response under one key.

    `top_k` (0: no limit), `top_p` (1: all) and `min_p` (0: none) limit which ids are drawn from.
    `forced`, when not empty, are recorded tokens to produce instead of drawing: exactly `max_tokens` of them.
    """

    key: SampleKey
    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    forced: tuple[int, ...] = ()

    @property
    def limited(self) -> bool:
        """Whether every token comes with its support. Greedy tokens (temperature 0) are never limited."""
        return self.temperature > 0 and is_limited(self.top_k, self.top_p, self.min_p)


def limits_problem(top_k: int, top_p: float, min_p: float) -> str:
    """What is wrong with these limits, which are compared in fp32; empty when nothing is."""
    if not (top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
        return f"want top_k >= 0, top_p in (0, 1] and min_p in [0, 1], got {top_k}, {top_p} and {min_p}"
    if 1 - 2**-25 < top_p < 1 or 0 < min_p < 2**-126:
        return f"top_p {top_p} or min_p {min_p} limits nothing once it is rounded to fp32; use 1 or 0 for no limit"
    return ""


def is_limited(top_k: int, top_p: float, min_p: float) -> bool:
    """Whether any of the three leaves ids out."""
    return top_k > 0 or top_p < 1 or min_p > 0


@dataclass(frozen=True)
class Support:
    """The ids that a sampler kept for each token of one response: the next counts[i] of `ids`, ascending.

    A count of 0 keeps all ids. Both are arrays of 32-bit integers.
    """

    counts: array[int]
    ids: array[int]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Support:
        """From the kept ids of each token."""
        return cls(array("i", map(len, rows)), array("i", [i for row in rows for i in row]))

    def rows(self) -> Iterator[array[int]]:
        """The kept ids of each token."""
        start = 0
        for count in self.counts:
            yield self.ids[start : start + count]
            start += count

    def problem(self, token_ids: Sequence[int]) -> str:
        """What is wrong with this as the support of these tokens; empty when each lies in its own."""
        if len(self.counts) != len(token_ids):
            return f"{len(self.counts)} supports for {len(token_ids)} tokens"
        if min(self.counts, default=0) < 0 or sum(self.counts) != len(self.ids):
            return f"supports of {sum(self.counts)} ids in all, but {len(self.ids)} are given"
        for position, (token, kept) in enumerate(zip(token_ids, self.rows(), strict=True)):
            if kept and token not in kept:
                return f"token {token} at {position} is not in its support of {len(kept)} ids"
            if kept and (kept[0] < 0 or any(left >= right for left, right in pairwise(kept))):
                return f"the support at {position} is not a list of ascending ids"
        return ""


@dataclass(frozen=True)
class Rollout:
    """One response as the rollout engine reported it.

    `logp_bits` holds one fp32 bit pattern per response token; `version` is the weight version that the
    engine itself held while it produced every one of these tokens; `contract` is the digest of the run
    contract under which the engine scored them (empty on a native route). `support` holds the ids that top-k,
    top-p and min-p kept for each token, over which the log-probabilities are; None when nothing was limited.
    """

    key: SampleKey
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logp_bits: tuple[int, ...]
    version: WeightVersion
    contract: str
    finish_reason: str
    engine: int
    support: Support | None = None


@dataclass(frozen=True)
class TrainSample:
    """One response as the trainer receives it: prompt and response ids in one sequence.

    `rollout_contract` is the digest of the run contract under which the rollout engine scored the tokens. `support`
    is what the rollout engine kept for each response token: the trainer's log-probability is over the same ids.
    `temperature` is that of this sample; None means the trainer's own.
    """

    key: SampleKey
    token_ids: tuple[int, ...]
    prompt_length: int
    advantage: float
    rollout_logp_bits: tuple[int, ...]
    rollout_contract: str = ""
    support: Support | None = None
    temperature: float | None = None

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length


class Part(NamedTuple):
    """Rows [start, stop) along `dim` of one parameter, under its Hugging Face name."""

    name: str
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class ShardDigest:
    """The digest of rows [start, stop) along `dim` of one parameter, under its Hugging Face name."""

    name: str
    dim: int
    start: int
    stop: int
    digest: str

    @property
    def part(self) -> Part:
        return Part(self.name, self.dim, self.start, self.stop)


@dataclass(frozen=True)
class StepResult:
    """What one training step computed. `logp_bits` are the trainer's own, before the update."""

    step: int
    logp_bits: dict[SampleKey, tuple[int, ...]]
    loss: float
    policy_loss: float
    kl: float
    grad_norm: float
    clip_fraction: float
    ratio_mean: float
    tokens: int
    seconds: dict[str, float] = field(default_factory=dict)
