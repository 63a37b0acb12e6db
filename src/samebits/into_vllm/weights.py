"""Weights inside one worker: loaded in place under Hugging Face names, digested shard by shard, versioned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from samebits.bits import raw, tree_digests
from samebits.collectives.lending import borrow, lent_shapes
from samebits.into_vllm.layers import Routed
from samebits.into_vllm.routing import RoutedModule
from samebits.timeline.types import Part, ShardDigest, WeightVersion


class WorkerWeights:
    """The weights that one worker holds, and the name of their version.

    Native layers run packed copies and drop the originals. Their plain parameters are kept aside here: a
    publication fills those again and lets vLLM pack anew.
    """

    def __init__(self, model: Any, dtype: torch.dtype, modules: list[RoutedModule], compiled: bool) -> None:
        self._model, self._dtype, self._compiled = model, dtype, compiled
        self._packed: list[Any] = [
            m.module for m in modules if not isinstance(m.module, Routed) and hasattr(m.module, "quant_method")
        ]
        self._plain: list[dict[str, nn.Parameter]] = []
        self.version: WeightVersion | None = None
        self.shards: list[ShardDigest] = []

    def loaded(self, version: WeightVersion) -> None:
        """Call after plain weights are in place and before vLLM packs them: digests, then the version."""
        self._plain = [dict(layer.named_parameters(recurse=False)) for layer in self._packed]
        self.shards = shard_digests(self._model, self._dtype)
        self.version = version

    def live(self) -> list[ShardDigest]:
        """The digests of what is held now. Of packed native layers only the plain weights they were packed from."""
        with self._unpacked():
            return shard_digests(self._model, self._dtype)

    def slices(self, name: str) -> list[tuple[int, int, Any]]:
        """(dim, first row, bits) of each slice of one Hugging Face parameter that is held here."""
        with self._unpacked():
            return [
                (dim, start, raw(part.to(self._dtype)).numpy().copy())
                for hf_name, dim, start, part in held_slices(self._model)
                if hf_name == name
            ]

    @contextmanager
    def _unpacked(self) -> Iterator[None]:
        """Packed layers show their plain weights for a while."""
        packed = [dict(layer.named_parameters(recurse=False)) for layer in self._packed]
        self._show(self._plain)
        try:
            yield
        finally:
            self._show(packed)

    def _show(self, parameters: list[dict[str, nn.Parameter]]) -> None:
        for layer, held in zip(self._packed, parameters, strict=True):
            for name, parameter in held.items():
                setattr(layer, name, parameter)

    def publish(self, path: str, version: WeightVersion) -> list[ShardDigest]:
        """Load every parameter from the safetensors files in `path`; what this worker then holds, by digest.

        The version is unknown while loading, so a failure leaves an engine that refuses to generate.
        Raises ValueError when the files lack a parameter of the model.
        """
        self.version = None
        self._show(self._plain)
        with torch.no_grad():
            names = self._model.load_weights(_published(path))
        missing = {name for name, _ in self._model.named_parameters()} - set(names or ())
        if missing:
            raise ValueError(f"publish: {path} has no weights for {', '.join(sorted(missing)[:5])}")
        self.loaded(version)
        for layer in self._packed:
            _pack_again(layer, self._compiled)
        return self.shards


def _pack_again(layer: Any, compiled: bool) -> None:
    """Let vLLM pack a native layer's new weights. Compiled code keeps the packed tensor that it was traced with,
    so there the new one is copied into it. Raises RuntimeError where that tensor can't be found."""
    traced = getattr(layer, "cpu_linear", None)  # only the CPU packs
    layer.quant_method.process_weights_after_loading(layer)
    if traced is None or not compiled:
        return
    old, new = _packed_tensor(traced), _packed_tensor(layer.cpu_linear)
    if old is None or new is None or old.shape != new.shape:
        raise RuntimeError(
            f"publish: {type(layer).__name__} keeps its packed weights where compiled code can't be given new ones "
            "on this processor; start the engine with compiled = False"
        )
    old.copy_(new)
    layer.cpu_linear = traced


def _packed_tensor(linear: Any) -> Tensor | None:
    cells = [cell.cell_contents for cell in getattr(linear, "__closure__", None) or ()]
    return next((c for c in cells if isinstance(c, Tensor)), None)


def _published(path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a trainer published in `path`: as files, or lent on a card of this host."""
    if lent_shapes(Path(path)) is None:
        return read_safetensors(path)
    return borrow(Path(path))


def read_safetensors(path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of every safetensors file in a directory, in order of file and name."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"publish: no safetensors file in {path}")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                yield name, tensors.get_tensor(name)


def shard_digests(model: nn.Module, dtype: torch.dtype) -> list[ShardDigest]:
    """The digest of every slice of a Hugging Face parameter that this worker holds, as `dtype`."""
    held = {
        Part(name, dim, start, start + part.shape[dim]): part.to(dtype) for name, dim, start, part in held_slices(model)
    }
    return [ShardDigest(*part, found) for part, found in tree_digests(held).items()]


def held_slices(model: nn.Module) -> Iterator[tuple[str, int, int, Tensor]]:
    """(Hugging Face name, dim, first row, slice) of everything that this worker holds."""
    embed = model.get_submodule("model.embed_tokens")
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if module is not embed and parameter is embed.weight:
                continue  # a tied LM head has no name of its own
            name = f"{module_name}.{attribute}"
            yield from _hf_slices(name, module, parameter.data)


def _hf_slices(name: str, module: nn.Module, data: Tensor) -> Iterator[tuple[str, int, int, Tensor]]:
    """(Hugging Face name, dim, first row, slice) of each part of one vLLM parameter."""
    if isinstance(module, QKVParallelLinear):
        yield from _qkv_slices(name, module, data)
    elif isinstance(module, MergedColumnParallelLinear):
        for part, hf in zip(data.chunk(2), ("gate_proj", "up_proj"), strict=True):
            yield name.replace("gate_up_proj", hf), 0, module.tp_rank * part.shape[0], part
    elif isinstance(module, RowParallelLinear) and data.dim() == 2:
        yield name, 1, module.tp_rank * data.shape[1], data
    elif isinstance(module, VocabParallelEmbedding):
        rows = module.shard_indices
        yield name, 0, rows.org_vocab_start_index, data[: rows.num_org_elements]
    else:
        yield name, 0, 0, data


def _qkv_slices(name: str, module: Any, data: Tensor) -> Iterator[tuple[str, int, int, Tensor]]:
    sizes = [heads * module.head_size for heads in (module.num_heads, module.num_kv_heads, module.num_kv_heads)]
    kv_rank = module.tp_rank // module.num_kv_head_replicas
    for part, rank, hf in zip(
        torch.split(data, sizes), (module.tp_rank, kv_rank, kv_rank), ("q_proj", "k_proj", "v_proj"), strict=True
    ):
        yield name.replace("qkv_proj", hf), 0, rank * part.shape[0], part
