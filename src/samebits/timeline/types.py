"""The nouns of a run: which sample, which step, which weights. Plain data, standard library only.

Log-probabilities travel as the unsigned 32-bit patterns of their fp32 values, so that no conversion
between the engine that reported a value and the record that holds it can change it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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

    `forced`, when not empty, are recorded tokens to produce instead of drawing: exactly `max_tokens` of them.
    """

    key: SampleKey
    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    forced: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """One response as the rollout engine reported it.

    `logp_bits` holds one fp32 bit pattern per response token; `version` is the weight version that the
    engine itself held while it produced every one of these tokens; `contract` is the digest of the run
    contract under which the engine scored them (empty on a native route).
    """

    key: SampleKey
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logp_bits: tuple[int, ...]
    version: WeightVersion
    contract: str
    finish_reason: str
    engine: int


@dataclass(frozen=True)
class TrainSample:
    """One response as the trainer receives it: prompt and response ids in one sequence.

    `rollout_contract` is the digest of the run contract under which the rollout engine scored the tokens.
    """

    key: SampleKey
    token_ids: tuple[int, ...]
    prompt_length: int
    advantage: float
    rollout_logp_bits: tuple[int, ...]
    rollout_contract: str = ""

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True)
class ShardDigest:
    """The digest of rows [start, stop) along `dim` of one parameter, under its Hugging Face name."""

    name: str
    dim: int
    start: int
    stop: int
    digest: str


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
