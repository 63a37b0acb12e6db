"""The one place that maps Hugging Face tensors to Megatron-Core parameters and back, bit for bit.

Megatron interleaves query, key and value by key/value group, stacks gate on up, pads the vocabulary with zero
rows, and splits over tensor-parallel ranks; nothing is ever computed on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from samebits.into_megatron.model import ModelShape

HFTensors = Mapping[str, Tensor]
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"


@dataclass(frozen=True)
class Mapped:
    """One Megatron parameter: its name, the Hugging Face tensors that it holds, and the two directions.

    `pack` makes one rank's shard from the whole tensors; `unpack` makes the whole tensors from all shards.
    """

    name: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    pack: Callable[[Sequence[Tensor], int, int], Tensor]
    unpack: Callable[[Sequence[Tensor]], list[Tensor]]

    def whole(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """The Hugging Face tensors, contiguous, from the shards of all tensor-parallel ranks in rank order."""
        return dict(zip(self.sources, (part.contiguous() for part in self.unpack(shards)), strict=True))


def parameter_map(shape: ModelShape) -> list[Mapped]:
    """Every parameter of the model, in Megatron's order."""
    hidden = shape.hidden
    mapped = [_vocabulary(EMBEDDING, "model.embed_tokens.weight", shape)]
    for layer in range(shape.layers):
        mapped += _layer(f"decoder.layers.{layer}.", f"model.layers.{layer}.", shape)
    mapped.append(_replicated("decoder.final_layernorm.weight", "model.norm.weight", (hidden,)))
    if not shape.tied:
        mapped.append(_vocabulary(HEAD, "lm_head.weight", shape))
    return mapped


def _layer(ours: str, theirs: str, shape: ModelShape) -> Iterator[Mapped]:
    hidden, attention, mlp = shape.hidden, f"{theirs}self_attn.", f"{theirs}mlp."
    yield _replicated(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", (hidden,))
    yield _columns(
        f"{ours}self_attention.linear_proj.weight",
        f"{attention}o_proj.weight",
        (hidden, shape.heads * shape.head_dim),
    )
    yield _qkv(f"{ours}self_attention.linear_qkv.weight", attention, "weight", (hidden,), shape)
    if shape.qkv_bias:
        yield _qkv(f"{ours}self_attention.linear_qkv.bias", attention, "bias", (), shape)
    if shape.qk_norm:
        for which in "qk":
            yield _replicated(
                f"{ours}self_attention.{which}_layernorm.weight", f"{attention}{which}_norm.weight", (shape.head_dim,)
            )
    yield _replicated(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", (hidden,))
    yield _gate_up(f"{ours}mlp.linear_fc1.weight", mlp, shape)
    yield _columns(f"{ours}mlp.linear_fc2.weight", f"{mlp}down_proj.weight", (hidden, shape.ffn))


def _replicated(ours: str, theirs: str, size: tuple[int, ...]) -> Mapped:
    def unpack(shards: Sequence[Tensor]) -> list[Tensor]:
        for rank, shard in enumerate(shards[1:], start=1):
            if not torch.equal(shard.view(torch.int16), shards[0].view(torch.int16)):
                raise RuntimeError(f"{ours}: rank {rank} holds other bits than rank 0 of a replicated parameter")
        return [shards[0]]

    return Mapped(ours, (theirs,), (size,), lambda whole, rank, ranks: whole[0], unpack)


def _columns(ours: str, theirs: str, size: tuple[int, int]) -> Mapped:
    return Mapped(
        ours,
        (theirs,),
        (size,),
        lambda whole, rank, ranks: whole[0].chunk(ranks, dim=1)[rank],
        lambda shards: [torch.cat(list(shards), dim=1)],
    )


def _vocabulary(ours: str, theirs: str, shape: ModelShape) -> Mapped:
    def pack(whole: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        padded = whole[0].new_zeros(shape.padded_vocab(ranks), shape.hidden)
        padded[: shape.vocab] = whole[0]
        return padded.chunk(ranks)[rank]

    return Mapped(
        ours,
        (theirs,),
        ((shape.vocab, shape.hidden),),
        pack,
        lambda shards: [torch.cat(list(shards))[: shape.vocab]],
    )


def _qkv(ours: str, theirs: str, kind: str, tail: tuple[int, ...], shape: ModelShape) -> Mapped:
    groups, head_dim = shape.kv_heads, shape.head_dim
    per_group = shape.heads // groups

    def pack(whole: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        by_group = [part.reshape(groups, -1, *tail) for part in whole]
        # Ranks that outnumber the groups each hold a part of one.
        return torch.cat(by_group, dim=1).reshape(-1, *tail).chunk(ranks)[rank]

    def unpack(shards: Sequence[Tensor]) -> list[Tensor]:
        by_group = torch.cat(list(shards)).reshape(groups, (per_group + 2) * head_dim, *tail)
        parts = by_group.split([per_group * head_dim, head_dim, head_dim], dim=1)
        return [part.reshape(-1, *tail) for part in parts]

    rows = (shape.heads * head_dim, groups * head_dim, groups * head_dim)
    names = tuple(f"{theirs}{which}_proj.{kind}" for which in "qkv")
    return Mapped(ours, names, tuple((count, *tail) for count in rows), pack, unpack)


def _gate_up(ours: str, theirs: str, shape: ModelShape) -> Mapped:
    size = (shape.ffn, shape.hidden)

    def unpack(shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[which] for half in halves]) for which in (0, 1)]

    return Mapped(
        ours,
        (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"),
        (size, size),
        lambda whole, rank, ranks: torch.cat([part.chunk(ranks)[rank] for part in whole]),
        unpack,
    )


def to_megatron(tensors: HFTensors, shape: ModelShape, rank: int, ranks: int) -> dict[str, Tensor]:
    """One tensor-parallel rank's parameters, contiguous, from a complete set of Hugging Face tensors.

    Raises ValueError naming every missing or unknown tensor, and the first one of a wrong shape or dtype.
    """
    check_form(tensors, shape)
    table = tensors["model.embed_tokens.weight"]
    if shape.tied and not torch.equal(tensors.get("lm_head.weight", table), table):
        raise ValueError("lm_head.weight: the model ties it to model.embed_tokens.weight, but their values differ")
    return {
        entry.name: entry.pack([tensors[name] for name in entry.sources], rank, ranks).contiguous()
        for entry in parameter_map(shape)
    }


def check_form(tensors: HFTensors, shape: ModelShape) -> None:
    """Raise ValueError naming every missing or unknown tensor, or the first one of a wrong shape or dtype.

    Values are not read: what `read_headers` gives is enough.
    """
    wanted = {
        name: size for entry in parameter_map(shape) for name, size in zip(entry.sources, entry.shapes, strict=True)
    }
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if shape.tied and "lm_head.weight" in unknown:
        unknown.remove("lm_head.weight")
    if missing:
        raise ValueError(f"tensors are missing: {_first(missing)}")
    if unknown:
        raise ValueError(f"tensors that this architecture does not have: {_first(unknown)}")
    for name, size in wanted.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != size or tensor.dtype != torch.bfloat16:
            found = f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
            convert = "; convert the checkpoint to bfloat16" if tensor.dtype != torch.bfloat16 else ""
            raise ValueError(f"{name}: expected bfloat16 {list(size)}, got {found}{convert}")


def _first(names: Sequence[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def from_megatron(shards: Sequence[HFTensors], shape: ModelShape) -> dict[str, Tensor]:
    """The complete Hugging Face tensors, contiguous, from the parameters of all tensor-parallel ranks in rank order."""
    whole: dict[str, Tensor] = {}
    for entry in parameter_map(shape):
        whole |= entry.whole([shard[entry.name] for shard in shards])
    return whole


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a model directory: `model.safetensors`, or the files its index names.

    Raises ValueError when files are missing, unreadable, or hold one name twice.
    """
    return _read(Path(path), lambda opened, name: opened.get_tensor(name))


def read_headers(path: str | Path) -> dict[str, Tensor]:
    """As `read_tensors`, but names, shapes and dtypes alone: the tensors are on torch's device `meta`."""
    return _read(Path(path), _without_values)


def _read(path: Path, take: Callable[[Any, str], Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in sorted(opened.keys()):
                    if name in tensors:
                        raise ValueError(f"{file}: {name} is in an earlier file too")
                    tensors[name] = take(opened, name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a readable safetensors file: {error}") from error
    return tensors


def _without_values(opened: Any, name: str) -> Tensor:
    stored = opened.get_slice(name)
    shape = stored.get_shape()
    return torch.empty(shape, dtype=(stored[:0] if shape else opened.get_tensor(name)).dtype, device="meta")


def _weight_files(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(f"{path}: neither model.safetensors nor model.safetensors.index.json is here")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [path / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} names no files: want JSON with a weight_map from tensors to files") from error


def load_parameters(path: str | Path, shape: ModelShape, ranks: int, rank: int) -> dict[str, Tensor]:
    """One tensor-parallel rank's parameters of a model directory, under Megatron's names for the whole model.

    A tied model has its table twice: as embedding and as output layer, which may be on another pipeline stage.
    """
    shard = to_megatron(read_tensors(path), shape, rank, ranks)
    if shape.tied:
        shard[HEAD] = shard[EMBEDDING]
    return shard


def save_tensors(tensors: HFTensors, directory: Path) -> None:
    """Write `directory`/model.safetensors; the name appears only when the file is complete.

    Raises OSError that names the file which could not be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / "model.safetensors.part"
    try:
        save_file(dict(tensors), unfinished, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {unfinished}: {error}") from error
    unfinished.replace(directory / "model.safetensors")
