"""Producing recorded tokens again instead of drawing new ones, on every route: the engine's own decode, forced.

A row's next token is the recorded one at its position in the response; its log-probability is what the route's own
code computes for it. So two engines, or two routes, can be compared on identical tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata

from samebits.into_vllm.batch_rows import BatchRows

FORCED = "samebits_forced"
_DRAWN = -1  # where nothing is recorded for a row


class ForcedTokens(BatchRows[tuple[list[int], list[int]]]):
    """Row of the batch -> the tokens that its request must produce, and those it has produced so far."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for a list of recorded tokens that is none, or too short for the request."""
        wanted = (sampling_params.extra_args or {}).get(FORCED, [])
        if not isinstance(wanted, list) or not all(isinstance(token, int) for token in wanted):
            raise ValueError(f"sampling: extra_args[{FORCED!r}] must be a list of token ids, got {wanted!r:.80}")
        if wanted and sampling_params.max_tokens != len(wanted):
            raise ValueError(
                f"sampling: max_tokens is {sampling_params.max_tokens}, but {len(wanted)} recorded tokens are forced"
            )

    def keep(self, params: SamplingParams, tokens: list[int]) -> tuple[list[int], list[int]]:
        return (params.extra_args or {}).get(FORCED, []), tokens

    def put_into(self, drawn: Tensor) -> Tensor:
        """Drawn tokens [rows] with the recorded ones in place of those of requests that are forced."""
        named = [_DRAWN] * len(drawn)
        for row in range(len(drawn)):
            wanted, produced = self.rows[row] or ([], [])
            if wanted:
                # Rows still in their prefill are sampled too, and what they give is thrown away.
                named[row] = wanted[min(len(produced), len(wanted) - 1)]
        # pinned, so that no step waits for the card
        given = torch.tensor(named, dtype=drawn.dtype, device="cpu", pin_memory=drawn.is_cuda)
        given = given.to(drawn.device, non_blocking=True)
        return torch.where(given == _DRAWN, drawn, given)


def forced_tokens(metadata: SamplingMetadata) -> ForcedTokens | None:
    """The processor that holds the recorded tokens of this batch, on an engine that has one."""
    return next((one for one in metadata.logitsprocs.argmax_invariant if isinstance(one, ForcedTokens)), None)


def force_native(sampler: Any) -> None:
    """Makes one native sampler produce recorded tokens. Its logits and log-probabilities stay its own."""
    draw = sampler.sample

    def sample(logits: Tensor, metadata: SamplingMetadata, *rest: Any, **more: Any) -> Any:
        drawn, scores = draw(logits, metadata, *rest, **more)
        processor = forced_tokens(metadata)
        if processor is None:
            raise RuntimeError("sampling: the logits processor that holds the recorded tokens is not loaded")
        return processor.put_into(drawn), scores

    sampler.sample = sample
