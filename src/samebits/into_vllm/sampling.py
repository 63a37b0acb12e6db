"""Choosing tokens and scoring them, on the same fp32 logits, with draws that depend on nothing but a key.

The key of a draw is (seed of the request, position of the token in the response). vLLM moves requests between
rows, preempts and resumes them; `SampleKeys` follows through its logits-processor interface, whose batch
updates carry every request's parameters and the live list of its output tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from samebits.into_vllm.forced import forced_tokens
from samebits.into_vllm.places import NotCovered
from samebits.ops.logprob import logprob
from samebits.ops.sample import sample_and_logprob

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SEED = "samebits_seed"
# vLLM ranks start at 1; the contract's sampler does not compute any.
_NO_RANK = 0


class SampleKeys(LogitsProcessor):
    """Row of the batch -> seed of its request and the tokens it has produced so far."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        rows = vllm_config.scheduler_config.max_num_seqs
        self.seeds = torch.zeros(rows, dtype=torch.int64)
        self.outputs: list[list[int] | None] = [None] * rows

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse requests that the contract's sampler has no meaning for. Raises ValueError naming the setting."""
        extra = sampling_params.extra_args or {}
        if not isinstance(extra.get(SEED), int):
            raise ValueError(
                f"sampling: extra_args[{SEED!r}] must be the request's integer seed, got {extra.get(SEED)!r}"
            )
        neutral = SamplingParams(temperature=1.0)
        for name in _ONLY_NEUTRAL:
            if getattr(sampling_params, name) != getattr(neutral, name):
                raise ValueError(f"sampling: {name} = {getattr(sampling_params, name)!r} is not covered")

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.outputs[row] = None
        for row, params, _, tokens in batch_update.added:
            self._put(row, int((params.extra_args or {})[SEED]), tokens)
        for source, target, direction in batch_update.moved:
            seed, moving = int(self.seeds[source]), self.outputs[source]
            if direction == MoveDirectionality.SWAP:
                self._put(source, int(self.seeds[target]), self.outputs[target])
            else:
                self.outputs[source] = None
            self._put(target, seed, moving)

    def _put(self, row: int, seed: int, tokens: list[int] | None) -> None:
        self.seeds[row] = seed
        self.outputs[row] = tokens

    def keys(self, rows: int) -> tuple[Tensor, Tensor]:
        """(seeds, positions) of the first `rows` rows, int64. Raises RuntimeError for a row without a request."""
        live = self.outputs[:rows]
        if None in live:
            raise RuntimeError(f"sampling: row {live.index(None)} of {rows} has no request, so it has no key")
        return self.seeds[:rows], torch.tensor([len(tokens) for tokens in live])  # type: ignore[arg-type]


# Settings that must stay at their defaults: each would change the logits, the draw or what is returned.
_ONLY_NEUTRAL = (
    "n",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "structured_outputs",
)


class KeyedSampler(Sampler):
    """vLLM's sampler with the contract's draw and log-probability in place of everything it does to logits."""

    calls: list[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = [0]

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """Draws one token per row and scores it at the row's temperature (1 for greedy rows).

        Returns token ids [rows, 1] and their log-probabilities, fp32 [rows, 1], both from these logits.
        """
        self.calls[0] += 1
        rows = logits.shape[0]
        seeds, positions = _keys_of(sampling_metadata).keys(rows)
        wanted = sampling_metadata.temperature
        temperature = torch.zeros(rows, device=logits.device) if wanted is None else wanted[:rows]
        drawn, scores = sample_and_logprob(logits, temperature, seeds.to(logits.device), positions.to(logits.device))
        forced = forced_tokens(sampling_metadata)
        if forced is not None:
            drawn = forced.put_into(drawn)
            scores = logprob(logits, drawn, torch.where(temperature > 0, temperature, 1.0))
        ids = drawn.to(torch.int32).unsqueeze(-1)
        ranks = torch.full((rows,), _NO_RANK, dtype=torch.int64, device=logits.device)
        return SamplerOutput(ids, LogprobsTensors(ids, scores.unsqueeze(-1), ranks))

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        raise NotCovered("sampling: prompt log-probabilities are not covered")


def _keys_of(metadata: SamplingMetadata) -> SampleKeys:
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, SampleKeys):
            return processor
    raise RuntimeError("sampling: the logits processor that keeps the keys of draws is not loaded")
