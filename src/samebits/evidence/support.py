"""What limited a run's draws, checked against the supports that its sidecars hold. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samebits.evidence.sidecar import StepSample
from samebits.timeline.types import is_limited


@dataclass
class Limits:
    """A run's top-k, top-p and min-p; and how many tokens and kept ids were met so far."""

    top_k: int
    top_p: float
    min_p: float
    tokens: int = 0
    kept: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Limits:
        """From a manifest's settings; runs that know no limits had none. Raises ValueError for another type."""
        values = {"top_k": config.get("top_k", 0), "top_p": config.get("top_p", 1.0), "min_p": config.get("min_p", 0.0)}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
                raise ValueError(f"config.{name} is {value!r}, want a number")
        return cls(**values)

    @property
    def limited(self) -> bool:
        return is_limited(self.top_k, self.top_p, self.min_p)

    def problem(self, samples: Sequence[StepSample]) -> str:
        """The first fault of a step's supports; empty when each token lies in a support that the limits allow."""
        for sample in samples:
            fault = self._fault(sample)
            if fault:
                return f"sample {sample.key}: {fault}"
        return ""

    def _fault(self, sample: StepSample) -> str:
        support = sample.support
        if support is None:
            return "no support is recorded, though the settings limit the draws" if self.limited else ""
        if not self.limited:
            return "supports are recorded, though the settings limit nothing"
        smallest, largest = min(support.counts, default=0), max(support.counts, default=0)
        if smallest < 1 or (self.top_k and largest > self.top_k):
            return f"supports of {smallest} to {largest} ids, the settings allow 1 to {self.top_k or 'any number'}"
        self.tokens += len(support.counts)
        self.kept += len(support.ids)
        return support.problem(sample.token_ids)

    def describe(self) -> str:
        """One line; empty when nothing was limited."""
        if not self.limited:
            return ""
        parts = [f"top-k {self.top_k}"] if self.top_k else []
        parts += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        parts += [f"min-p {self.min_p:g}"] if self.min_p > 0 else []
        mean = self.kept / max(self.tokens, 1)
        return f"{', '.join(parts)}; all {self.tokens} tokens lie in their recorded supports, {mean:.1f} ids on average"
