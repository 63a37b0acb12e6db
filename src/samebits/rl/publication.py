"""Publishing weights: export, load in every engine, and check each parameter's digest on both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from samebits.bits import part_digests, tree_digests
from samebits.collectives.lending import lent_shapes
from samebits.contract import digest_of
from samebits.rl.protocols import RunFailed
from samebits.timeline.types import Part, ShardDigest, WeightVersion


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


def check_publication(
    path: Path,
    exported: Mapping[str, str],
    engines: Sequence[Sequence[ShardDigest]],
    lent_digests: Callable[[Sequence[Part]], Sequence[str]],
) -> None:
    """What was published is what the trainer holds, and what every engine holds, part by part and in full.

    Files are read and digested once more. Of tensors that are lent on a card, engines must hold the digests that the
    trainer took; `lent_digests` asks it for those of parts. Raises RunFailed that names the parameter and the side on a
    difference, a gap or a stranger.
    """
    lent = lent_shapes(path)
    weights = read_weights(path) if lent is None else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()} if lent is None else lent
    if set(shapes) != set(exported):
        strangers = sorted(set(shapes) ^ set(exported))
        raise RunFailed(f"published weights and the trainer's digests name different parameters: {strangers[:4]}")
    for name, found in tree_digests(weights).items():
        if found != exported[name]:
            raise RunFailed(f"parameter {name!r}: the exported file does not hold the trainer's bits")
    for number, shards in enumerate(engines):
        _check_places(f"rollout engine {number}", shapes, shards)
    parts = sorted({shard.part for shards in engines for shard in shards})
    wanted = {part: exported[part.name] for part in parts if _is_whole(part, shapes)}
    rest = [part for part in parts if part not in wanted]
    if rest:
        answers = part_digests(weights, rest) if lent is None else lent_digests(rest)
        wanted |= zip(rest, answers, strict=True)
    for number, shards in enumerate(engines):
        _check_engine(f"rollout engine {number}", shapes, shards, wanted)


def _is_whole(part: Part, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return part.stop - part.start == shapes[part.name][part.dim]


def _check_places(engine: str, shapes: Mapping[str, tuple[int, ...]], shards: Sequence[ShardDigest]) -> None:
    for shard in shards:
        if shard.name not in shapes:
            raise RunFailed(f"{engine} holds a parameter that was not published: {shard.name!r}")
        shape = shapes[shard.name]
        if not 0 <= shard.start < shard.stop <= shape[shard.dim]:
            raise RunFailed(
                f"{engine}: rows {shard.start}:{shard.stop} of {shard.name!r} do not exist in "
                f"{list(shape)} (dim {shard.dim})"
            )


def _check_engine(
    engine: str, shapes: Mapping[str, tuple[int, ...]], shards: Sequence[ShardDigest], wanted: Mapping[Part, str]
) -> None:
    covered: dict[str, set[tuple[int, int, int]]] = {name: set() for name in shapes}
    for shard in shards:
        if wanted[shard.part] != shard.digest:
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
