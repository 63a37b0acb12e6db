"""One step's sidecar: what every sample held, as raw tensors. The layout, and the reader the verifier uses.

sample_keys     I32 [S, 3]   step, prompt, sample
sample_offsets  I64 [S + 1]  where each sample's tokens start; the last is T
prompt_lengths  I32 [S]
token_ids       I32 [T]      prompt and response of each sample, one after the other
active_mask     U8  [T]      1 on response tokens, 0 on prompt tokens
rollout_logp    F32 [R]      as the rollout engine reported it, one per active token
trainer_logp    F32 [R]      as the trainer's own forward computed it
weight_version  I64 [R]      version under which the engine produced the token
rewards         F64 [S]
advantages      F64 [S]

Where top-k, top-p or min-p limited the draws, also:
support_counts  I32 [R]      how many ids the sampler kept for each active token
support_ids     I32 [N]      these ids, ascending for each token, one token after the other
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from samebits.evidence.tensors import RawTensor, read_tensors
from samebits.timeline.types import Support

DTYPES = {
    "sample_keys": "I32",
    "sample_offsets": "I64",
    "prompt_lengths": "I32",
    "token_ids": "I32",
    "active_mask": "U8",
    "rollout_logp": "F32",
    "trainer_logp": "F32",
    "weight_version": "I64",
    "rewards": "F64",
    "advantages": "F64",
}
SUPPORT_DTYPES = {"support_counts": "I32", "support_ids": "I32"}


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """One sample of a step: ids, both log-probabilities as bit patterns, version and support per response token."""

    key: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    rollout_bits: Sequence[int]
    trainer_bits: Sequence[int]
    versions: Sequence[int]
    reward: float
    advantage: float
    support: Support | None = None


def sidecar_name(step: int) -> str:
    """The path of a step's sidecar inside its run directory."""
    return f"steps/step_{step:05d}.safetensors"


def read_step(path: Path) -> list[StepSample]:
    """The samples of a sidecar in order. Raises ValueError for missing, extra or inconsistent tensors."""
    tensors = read_tensors(path)
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    if found not in (DTYPES, DTYPES | SUPPORT_DTYPES):
        raise ValueError(f"{path.name}: tensors {sorted(found.items())}, want {sorted(DTYPES.items())}")
    count = len(tensors["prompt_lengths"].values())
    offsets = tensors["sample_offsets"].values()
    prompts = tensors["prompt_lengths"].values()
    total, active = len(tensors["token_ids"].values()), len(tensors["rollout_logp"].bits32())
    shapes: dict[str, tuple[int, ...]] = {
        "sample_keys": (count, 3),
        "sample_offsets": (count + 1,),
        "token_ids": (total,),
        "active_mask": (total,),
    }
    shapes |= dict.fromkeys(("prompt_lengths", "rewards", "advantages"), (count,))
    shapes |= dict.fromkeys(("rollout_logp", "trainer_logp", "weight_version"), (active,))
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{path.name}: {name} has shape {tensors[name].shape}, want {shape}")
    if offsets[0] != 0 or offsets[count] != total or active + sum(prompts) != total:
        raise ValueError(f"{path.name}: offsets and prompt lengths do not tile {total} tokens")
    keys, mask = tensors["sample_keys"].values(), tensors["active_mask"].values()
    ids, versions = tensors["token_ids"].values(), tensors["weight_version"].values()
    rollout, trainer = tensors["rollout_logp"].bits32(), tensors["trainer_logp"].bits32()
    rewards, advantages = tensors["rewards"].values(), tensors["advantages"].values()
    supports = _read_supports(path.name, tensors, active)
    samples = []
    at = 0
    for row in range(count):
        start, split, stop = offsets[row], offsets[row] + prompts[row], offsets[row + 1]
        if not start < split < stop:
            raise ValueError(f"{path.name}: sample {row} spans {start}, {split}, {stop}: an empty part")
        if any(mask[start:split]) or any(bit != 1 for bit in mask[split:stop]):
            raise ValueError(f"{path.name}: active_mask of sample {row} is not 0 on prompt and 1 on response")
        end = at + stop - split
        samples.append(
            StepSample(
                key="/".join(str(part) for part in keys[3 * row : 3 * row + 3]),
                prompt_ids=ids[start:split],
                token_ids=ids[split:stop],
                rollout_bits=rollout[at:end],
                trainer_bits=trainer[at:end],
                versions=versions[at:end],
                reward=rewards[row],
                advantage=advantages[row],
                support=supports.part(at, end) if supports else None,
            )
        )
        at = end
    return samples


class _Supports:
    """The supports of all active tokens of a step."""

    def __init__(self, counts: Sequence[int], ids: Sequence[int]) -> None:
        self._counts, self._ids = array("i", counts), array("i", ids)
        self._starts = [0, *accumulate(counts)]

    def part(self, start: int, stop: int) -> Support:
        """Those of tokens [start, stop)."""
        return Support(self._counts[start:stop], self._ids[self._starts[start] : self._starts[stop]])


def _read_supports(name: str, tensors: Mapping[str, RawTensor], active: int) -> _Supports | None:
    if "support_counts" not in tensors:
        return None
    counts, ids = tensors["support_counts"].values(), tensors["support_ids"].values()
    if tensors["support_counts"].shape != (active,) or tensors["support_ids"].shape != (len(ids),):
        raise ValueError(f"{name}: support_counts and support_ids must have one axis, of {active} tokens and all ids")
    if min(counts, default=0) < 0 or sum(counts) != len(ids):
        raise ValueError(f"{name}: support_counts add up to {sum(counts)}, support_ids are {len(ids)}")
    return _Supports(counts, ids)
