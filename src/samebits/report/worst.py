"""The tokens that differ most, as text where the run's tokenizer is at hand."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samebits.evidence.compare import as_float
from samebits.evidence.sidecar import StepSample, read_step, sidecar_name
from samebits.evidence.store import sha256_file

CONTEXT = 24
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class WorstToken:
    """One token: where it stands, the text before it and its own, and both log-probabilities."""

    where: str
    before: str
    token: str
    rollout: float
    trainer: float
    bits: tuple[int, int]

    @property
    def difference(self) -> float:
        """Of the two values, as `_distance` takes it."""
        return _distance(self.rollout, self.trainer)


def worst_tokens(run: Path, steps: int, manifest: Mapping[str, Any], count: int = 10) -> list[WorstToken]:
    """The `count` mismatching tokens with the largest differences, the largest first. Without a tokenizer, ids."""
    decode = tokenizer_of(manifest) or (lambda ids: " ".join(map(str, ids)))
    worst = heapq.nlargest(count, _mismatches(run, steps), key=lambda found: found[0])
    tokens = []
    for _, sample, at in worst:
        bits = sample.rollout_bits[at], sample.trainer_bits[at]
        tokens.append(
            WorstToken(
                where=f"{sample.key}@{at}",
                before=decode([*sample.prompt_ids, *sample.token_ids[:at]][-CONTEXT:]),
                token=decode(sample.token_ids[at : at + 1]),
                rollout=as_float(bits[0]),
                trainer=as_float(bits[1]),
                bits=bits,
            )
        )
    return tokens


def _mismatches(run: Path, steps: int) -> Iterator[tuple[float, StepSample, int]]:
    """(size of the difference, sample, position) of every token with different bits; not a number counts most."""
    for step in range(1, steps + 1):
        for sample in read_step(run / sidecar_name(step)):
            for at, (left, right) in enumerate(zip(sample.rollout_bits, sample.trainer_bits, strict=True)):
                if left != right:
                    yield _distance(as_float(left), as_float(right)), sample, at


def _distance(left: float, right: float) -> float:
    """Infinite where one of the two, or their difference, is not a number."""
    size = abs(left - right)
    return math.inf if math.isnan(size) else size


def tokenizer_of(manifest: Mapping[str, Any]) -> Decode | None:
    """The decoder of the run's model, if its tokenizer is still where it was, unchanged, and can be read here."""
    inputs = manifest.get("inputs")
    model = inputs.get("model") if isinstance(inputs, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(model.get("files"), Mapping):
        return None
    file, digest = Path(str(model.get("path"))) / "tokenizer.json", model["files"].get("tokenizer.json")
    if find_spec("tokenizers") is None or not file.is_file() or sha256_file(file) != digest:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
