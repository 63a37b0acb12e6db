"""Publishing weights: export, load in every engine, and check each parameter's digest on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from samebits.bits import digest as tensor_digest
from samebits.bits import digests
from samebits.collectives.lending import lent_shapes
from samebits.contract import digest_of
from samebits.rl.protocols import RunFailed
from samebits.timeline.types import ShardDigest, WeightVersion


def version_of(counter: int, digests: Mapping[str, str]) -> WeightVersion:
    """The version that these parameters make: their names and digests, in the order of the names."""
    return WeightVersion(counter=counter, digest=digest_of(dict(digests)))


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in a directory, by name. Raises RunFailed for a name met twice."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as source:
            for name in source.keys():  # noqa: SIM118 - not a mapping
                if name in tensors:
                    raise RunFailed(f"{path}: parameter {name!r} lies in two files")
                tensors[name] = source.get_tensor(name)
    return tensors


def check_publication(path: Path, exported: Mapping[str, str], engines: Sequence[Iterable[ShardDigest]]) -> None:
    """What was published is what the trainer holds, and what every engine holds, part by part and in full.

    Files are read and digested once more; of tensors that are lent on a card, engines must hold the digests that the
    trainer took. Raises RunFailed that names the parameter and the side on a difference, a gap or a stranger.
    """
    shapes = lent_shapes(path)
    weights = read_weights(path) if shapes is None else {}
    if shapes is None:
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if set(shapes) != set(exported):
        strangers = sorted(set(shapes) ^ set(exported))
        raise RunFailed(f"published weights and the trainer's digests name different parameters: {strangers[:4]}")
    for name, found in digests(weights).items():
        if found != exported[name]:
            raise RunFailed(f"parameter {name!r}: the exported file does not hold the trainer's bits")

    def wanted(shard: ShardDigest) -> str:
        if shard.stop - shard.start == shapes[shard.name][shard.dim]:
            return exported[shard.name]
        if shard.name not in weights:
            raise RunFailed(f"an engine holds a part of {shard.name!r}, but weights that are lent have whole digests")
        return tensor_digest(weights[shard.name].narrow(shard.dim, shard.start, shard.stop - shard.start))

    for number, shards in enumerate(engines):
        _check_engine(f"rollout engine {number}", shapes, shards, wanted)


def _check_engine(
    engine: str,
    shapes: Mapping[str, tuple[int, ...]],
    shards: Iterable[ShardDigest],
    wanted: Callable[[ShardDigest], str],
) -> None:
    covered: dict[str, set[tuple[int, int, int]]] = {name: set() for name in shapes}
    for shard in shards:
        if shard.name not in shapes:
            raise RunFailed(f"{engine} holds a parameter that was not published: {shard.name!r}")
        shape = shapes[shard.name]
        if not 0 <= shard.start < shard.stop <= shape[shard.dim]:
            raise RunFailed(
                f"{engine}: rows {shard.start}:{shard.stop} of {shard.name!r} do not exist in "
                f"{list(shape)} (dim {shard.dim})"
            )
        if wanted(shard) != shard.digest:
            raise RunFailed(f"{engine}: {shard.name!r} [{shard.start}:{shard.stop}] differs from the published weights")
        covered[shard.name].add((shard.dim, shard.start, shard.stop))
    for name, spans in covered.items():
        _check_cover(engine, name, shapes[name], spans)


def _check_cover(engine: str, name: str, shape: tuple[int, ...], spans: set[tuple[int, int, int]]) -> None:
    dims = {dim for dim, _, _ in spans}
    reached = 0
    for _, start, stop in sorted(spans):
        if start > reached:
            break
        reached = max(reached, stop)
    if len(dims) != 1 or reached != shape[next(iter(dims))]:
        raise RunFailed(f"{engine}: {name!r} is not fully accounted for: parts {sorted(spans)}")
