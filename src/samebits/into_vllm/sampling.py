"""Choosing tokens and scoring them, on the same fp32 logits, with draws that depend on nothing but a key.

The key of a draw is (seed of the request, position of the token in the response). vLLM moves requests between
rows, preempts and resumes them; `SampleKeys` follows through its logits-processor interface.

Top-k, top-p and min-p act on the contract's own order; what they keep is remembered by request and position, for
the engine to take once its requests are finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from samebits.into_vllm.batch_rows import BatchRows
from samebits.into_vllm.calls import Calls
from samebits.into_vllm.forced import forced_tokens
from samebits.into_vllm.places import NotCovered
from samebits.ops.logprob import score
from samebits.ops.sample import draw, sample_and_logprob
from samebits.ops.sample_support import Kept, Limits, kept_logprob, sample_kept, sample_support

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SEED = "samebits_seed"
REQUEST = "samebits_request"
# vLLM ranks start at 1; none is computed unless the likeliest tokens are.
_NO_RANK = 0


@dataclass(frozen=True)
class _Row:
    """What one row of the batch holds: its request's key and limits, and the live list of tokens it has produced."""

    seed: int
    request: int
    top_k: int
    top_p: float
    min_p: float
    tokens: list[int]

    @classmethod
    def of(cls, params: SamplingParams, tokens: list[int]) -> _Row:
        extra = params.extra_args or {}
        return cls(extra[SEED], extra[REQUEST], max(0, params.top_k), params.top_p, params.min_p, tokens)


@dataclass(frozen=True)
class _Columns:
    """The rows of a batch, column by column; `seeds` lie where the logits do."""

    seeds: Tensor
    limits: Limits
    limited: bool

    @classmethod
    def of(cls, rows: list[_Row], device: torch.device) -> _Columns:
        limits = Limits(
            torch.tensor([row.top_k for row in rows], dtype=torch.int64),
            torch.tensor([row.top_p for row in rows], dtype=torch.float32),
            torch.tensor([row.min_p for row in rows], dtype=torch.float32),
        )
        return cls(_moved([row.seed for row in rows], device), limits, bool(limits.any().any()))


class SampleKeys(BatchRows[_Row]):
    """Row of the batch -> key and limits of its request, and the tokens it has produced so far."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._device = device
        self._columns: _Columns | None = None

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse requests that the contract's sampler has no meaning for. Raises ValueError naming the setting."""
        extra = sampling_params.extra_args or {}
        for name in (SEED, REQUEST):
            if not isinstance(extra.get(name), int):
                raise ValueError(f"sampling: extra_args[{name!r}] must be an integer, got {extra.get(name)!r}")
        neutral = SamplingParams(temperature=1.0)
        for name, reason in _ONLY_NEUTRAL.items():
            if getattr(sampling_params, name) != getattr(neutral, name):
                raise ValueError(f"sampling: {name} = {getattr(sampling_params, name)!r} is not covered{reason}")

    def keep(self, params: SamplingParams, tokens: list[int]) -> _Row:
        return _Row.of(params, tokens)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        super().update_state(batch_update)
        if batch_update is not None:
            self._columns = None

    def live(self, rows: int) -> list[_Row]:
        """The first `rows` rows. Raises RuntimeError for a row without a request."""
        live = self.rows[:rows]
        if None in live:
            raise RuntimeError(f"sampling: row {live.index(None)} of {rows} has no request, so it has no key")
        return live  # type: ignore[return-value]

    def columns(self, rows: int) -> _Columns:
        """Seeds and limits of the first `rows` rows."""
        if self._columns is None or len(self._columns.seeds) != rows:
            self._columns = _Columns.of(self.live(rows), self._device)
        return self._columns


# Settings that must stay at their defaults: each would change the logits, the draw or what is returned. Why, where
# it is not plain.
_PENALTY = ": a trainer would have to apply it to its own logits, token by token"
_ONLY_NEUTRAL = {
    "n": "",
    "seed": "",
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _PENALTY,
    "min_tokens": "",
    "logit_bias": "",
    "allowed_token_ids": "",
    "bad_words": "",
    "prompt_logprobs": "",
    "structured_outputs": "",
}


class KeyedSampler(Sampler):
    """vLLM's sampler with the contract's support, draw and log-probability in place of everything it does to logits.

    `supports` holds the kept ids of tokens drawn under limits, by request and position, until somebody takes them.
    """

    calls: Calls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = Calls()
        self.supports: dict[int, dict[int, bytes]] = {}

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """Draws one token per row and scores it at the row's temperature (1 for greedy rows), over what was kept.

        Returns token ids [rows, 1], and log-probabilities, fp32 [rows, 1 + n]: of the drawn token, then of the n
        likeliest, where a request asked for these. All come from these logits.
        """
        self.calls.note()
        rows, device = logits.shape[0], logits.device
        if not sampling_metadata.logitsprocs.argmax_invariant:
            return self._warm_up(logits)
        keys = _keys_of(sampling_metadata)
        top = sampling_metadata.max_num_logprobs or 0
        wanted = sampling_metadata.temperature
        temperature = torch.zeros(rows, device=device) if wanted is None else wanted[:rows]
        if top:
            logits, temperature = logits.cpu(), temperature.cpu()  # the same bits come of it
        kept, drawn, scores = self._draw(logits, temperature, keys, rows)
        forced = forced_tokens(sampling_metadata)
        if forced is not None:
            drawn = forced.put_into(drawn)
            scores = _scores(logits, drawn, temperature, kept)
        ids = drawn.to(device, torch.int32).unsqueeze(-1)
        if top:
            return SamplerOutput(ids, _with_likeliest(logits, temperature, kept or Kept.all(rows), drawn, top, device))
        ranks = torch.full((rows,), _NO_RANK, dtype=torch.int64, device=device)
        return SamplerOutput(ids, LogprobsTensors(ids, scores.to(device).unsqueeze(-1), ranks))

    def _warm_up(self, logits: Tensor) -> SamplerOutput:
        """The GPU runner tries the sampler before it serves, on a batch of no requests: a draw without keys."""
        rows = logits.shape[0]
        none = torch.zeros(rows, dtype=torch.int64, device=logits.device)
        drawn, scores = sample_and_logprob(logits, 1.0, none, none)
        ids = drawn.to(torch.int32).unsqueeze(-1)
        return SamplerOutput(ids, LogprobsTensors(ids, scores.unsqueeze(-1), none))

    def _draw(
        self, logits: Tensor, temperature: Tensor, keys: SampleKeys, rows: int
    ) -> tuple[Kept | None, Tensor, Tensor]:
        """What was kept (None: all, in every row), a token of each row, and their log-probabilities."""
        live, columns, device = keys.live(rows), keys.columns(rows), logits.device
        positions = [len(row.tokens) for row in live]
        key = columns.seeds.to(device), _moved(positions, device)
        if not columns.limited:
            # on a GPU nobody waits for the tokens here: a row without a distribution shows in the response
            return None, *(draw if logits.is_cuda else sample_and_logprob)(logits, temperature, *key)
        kept = sample_support(logits, temperature, columns.limits)
        self._remember(live, positions, kept)
        return kept, *sample_kept(logits, temperature, *key, kept)

    def _remember(self, live: list[_Row], positions: list[int], kept: Kept) -> None:
        """A position that is drawn again (a prompt in chunks) replaces what was there."""
        ids, offsets = kept.ids.to(torch.int32).numpy(), kept.offsets.tolist()
        for row, position, start, stop in zip(live, positions, offsets[:-1], offsets[1:], strict=True):
            if start < stop:
                self.supports.setdefault(row.request, {})[position] = ids[start:stop].tobytes()

    def take_supports(self) -> dict[int, dict[int, bytes]]:
        """Request -> position -> kept ids as 32-bit integers; they are forgotten here."""
        taken, self.supports = self.supports, {}
        return taken

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        raise NotCovered("sampling: prompt log-probabilities are not covered")


def _moved(values: list[int], device: torch.device) -> Tensor:
    """int64 on a device, without waiting for what it still computes."""
    there = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)


def holds_keys(processors: Any) -> bool:
    """Whether a worker's logits processors (vLLM's `LogitsProcessors`) include the one that keeps the draws' keys."""
    return any(isinstance(processor, SampleKeys) for processor in processors.argmax_invariant)


def _keys_of(metadata: SamplingMetadata) -> SampleKeys:
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, SampleKeys):
            return processor
    raise RuntimeError("sampling: the logits processor that keeps the keys of draws is not loaded")


def _scores(logits: Tensor, tokens: Tensor, temperature: Tensor, kept: Kept | None) -> Tensor:
    """fp32 [rows] of one token in each row, over what was kept; greedy rows at temperature 1."""
    warm = torch.where(temperature > 0, temperature, 1.0)
    return score(logits, tokens, warm) if kept is None else kept_logprob(logits, tokens[:, None], warm, kept)[:, 0]


def _with_likeliest(
    logits: Tensor, temperature: Tensor, kept: Kept, drawn: Tensor, count: int, device: torch.device
) -> LogprobsTensors:
    """The drawn token, then the `count` likeliest ones, lowest id first among equals; one may be the drawn one.

    A token outside its row's support has log-probability -inf and comes after those inside.
    """
    warm = torch.where(temperature == 0, 1.0, temperature)
    z = logits / warm[:, None]
    limited = kept.limited
    outside = limited[:, None].expand(z.shape).clone()
    outside[kept.owners(), kept.ids] = False
    order = z.masked_fill(outside, -torch.inf).argsort(dim=1, descending=True, stable=True)
    ids = torch.cat([drawn[:, None], order[:, :count]], dim=1).contiguous()
    ranks = 1 + (order == drawn[:, None]).int().argmax(dim=1)
    scores = kept_logprob(logits, ids, warm, kept)
    return LogprobsTensors(ids.to(device, torch.int32), scores.to(device), ranks.to(device))
