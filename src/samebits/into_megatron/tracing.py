"""Tracing one trainer rank by forward hooks: what every module wrote for which token, whatever the layout.

The fused head never holds logits. Those of traced tokens are computed once more, from the hidden states and the weight
that it was given; where the log-probability then agrees with theirs and the other side's does not, that shows too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.into_megatron.gpt import ScoringModel
from samebits.into_megatron.layout import MicroBatch
from samebits.into_megatron.token_rows import Placed
from samebits.linear_logp import LinearLogp, LinearLogpRequest
from samebits.ops.linear import matmul_f32
from samebits.ops.rotary import table_base
from samebits.trace import Entry, Point, Recorder, Rows
from samebits.trace.points import IDS, POSITIONS, TARGETS, TEMPERATURE


class RankTrace:
    """Records what the chunks of a model, on this rank, compute for some samples. `close` takes every hook back.

    `traced` maps the number of a sample to its last index of interest; `places` says where the tokens of each of
    `batches` lie.
    """

    def __init__(
        self,
        chunks: Sequence[ScoringModel],
        traced: Mapping[int, int],
        keep: Collection[Point],
        batches: Sequence[MicroBatch],
        places: Sequence[Placed],
    ) -> None:
        self._places = {id(batch): placed for batch, placed in zip(batches, places, strict=True)}
        self._traces = [ChunkTrace(chunk, Recorder(keep), self._places, traced) for chunk in chunks]

    def take(self) -> list[Entry]:
        """What was recorded since the last call."""
        return [entry for trace in self._traces for entry in trace.recorder.take()]

    def facts(self) -> dict[str, Any]:
        """Of every site that this rank computes: its code, its route and its parameters."""
        return {name: facts for trace in self._traces for name, facts in describe(trace.model).items()}

    def close(self) -> None:
        """Stop recording; the chunks are as they were."""
        for trace in self._traces:
            trace.close()


class ChunkTrace:
    """The hooks of one chunk. A pass begins and ends with the chunk's own forward, which is given the batch."""

    def __init__(self, chunk: Any, recorder: Recorder, places: Mapping[int, Placed], traced: Mapping[int, int]) -> None:
        self.model = chunk
        self.recorder = recorder
        self._places, self._traced = places, traced
        self._whole = chunk.shape.layers
        self._tp, self._ranks = chunk.tp_group.rank(), chunk.tp_group.size()
        self._handles: list[Any] = []
        self._placed: Placed | None = None
        self._batch: MicroBatch | None = None
        self._before(chunk, self._begin)
        for layer in self.model.decoder.layers:
            self._watch(layer.layer_number - 1, layer)
        self._scorer = chunk.scorer
        if chunk.post_process:
            self._after(self.model.decoder.final_layernorm, self._norm(self._whole, "stream", "normed"))
            self._after(self.model.output_layer, self._native_logits)  # does not run where the scorer has the head
            self.model.scorer = _WatchedScorer(chunk.scorer, self._head)
        self._after(chunk, self._end)

    def close(self) -> None:
        """Stop recording; the chunk is as it was."""
        for handle in self._handles:
            handle.remove()
        self.model.scorer = self._scorer

    def _begin(self, model: Any, args: tuple[MicroBatch, ...]) -> None:
        batch = args[0]
        self._batch, self._placed = batch, self._places[id(batch)]
        self.recorder.place(self._placed.rows(self._traced))
        self.recorder.note(IDS, batch.ids.t().reshape(-1, 1))
        if batch.packing is not None:
            self.recorder.note(POSITIONS, batch.packing.positions.long()[:, None])
        else:
            count = batch.ids.shape[0]
            positions = torch.arange(batch.ids.numel()) // count
            self.recorder.note(POSITIONS, positions[:, None])

    def _end(self, model: Any, args: tuple[MicroBatch, ...], out: Tensor) -> None:
        if model.post_process:
            self._scored(args[0], out)
        self.recorder.collect()

    def _watch(self, index: int, layer: Any) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        sharers = getattr(attention, "sharers", 1)
        self._after(layer.input_layernorm, self._norm(index, "stream", "normed"))
        if sharers == 1:  # ranks that share keys hold pieces of heads here
            self._after(attention.linear_qkv, self._qkv(index, attention))
        for which, shared in (("q", 1), ("k", sharers)):
            module = getattr(attention, f"{which}_layernorm")
            if module is not None and hasattr(module, "weight"):
                self._after(module, self._part_after(Point(index, f"{which}_normed"), shared))
        self._before(attention.core_attention, self._turned(index, sharers))
        self._after(attention.core_attention, self._part_after(Point(index, "mixed")))
        self._after(attention.linear_proj, self._first(Point(index, "attn_out")))
        self._after(layer.pre_mlp_layernorm, self._norm(index, "stream_mid", "ffn_normed"))
        self._after(mlp.linear_fc1, self._gate_up(index))
        self._before(mlp.linear_fc2, self._activated(index))
        self._after(mlp.linear_fc2, self._first(Point(index, "ffn_out")))

    def _after(self, module: Any, note: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_hook(note))

    def _before(self, module: Any, note: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(note))

    def _norm(self, layer: int, stream: str, normed: str) -> Callable[..., None]:
        def note(module: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
            self._tokens(Point(layer, stream), args[0])
            self._tokens(Point(layer, normed), out)

        return note

    def _first(self, point: Point) -> Callable[..., None]:
        return lambda module, args, out: self._tokens(point, out[0])

    def _qkv(self, layer: int, attention: Any) -> Callable[..., None]:
        def note(module: Any, args: Any, out: tuple[Tensor, Any]) -> None:
            groups = attention.num_query_groups_per_partition
            dim = attention.hidden_size_per_attention_head
            per_group = attention.num_attention_heads_per_partition // groups
            grouped = out[0].reshape(*out[0].shape[:2], groups, per_group + 2, dim)
            for name, part in zip("qkv", grouped.split([per_group, 1, 1], dim=3), strict=True):
                self._part(Point(layer, name), part)

        return note

    def _part_after(self, point: Point, sharers: int = 1) -> Callable[..., None]:
        return lambda module, args, out: self._part(point, out, sharers)

    def _turned(self, layer: int, sharers: int) -> Callable[..., None]:
        def note(module: Any, args: tuple[Any, ...]) -> None:
            query, key, value = args[:3]
            for name, part, shared in (("q_turned", query, 1), ("k_turned", key, sharers)):
                self._part(Point(layer, name), part, shared)
            if self._batch is not None and self._batch.packing is not None:
                key, value = module.all_keys(key, value, self._batch.packing)
            if not self.recorder.traces():
                return
            for name, part in (("keys", key), ("values", value)):
                self._prefixes(layer, name, part, sharers)

        return note

    def _prefixes(self, layer: int, name: str, part: Tensor, sharers: int) -> None:
        assert self._placed is not None
        flat = part.reshape(-1, part.shape[-2] * part.shape[-1])
        start, whole = self._columns(flat.shape[1], sharers)
        for keys, rows in self._placed.keys(self._traced):
            if len(rows):
                held = flat.index_select(0, keys.to(flat.device))
                self.recorder.note_prefixes(layer, name, held, rows, start=start, whole=whole)

    def _columns(self, width: int, sharers: int = 1) -> tuple[int, int]:
        """First column and width of the whole row, of a part that so many neighbouring ranks hold alike."""
        return self._tp // sharers * width, max(1, self._ranks // sharers) * width

    def _gate_up(self, layer: int) -> Callable[..., None]:
        def note(module: Any, args: Any, out: tuple[Tensor, Any]) -> None:
            for name, half in zip(("gate", "up"), out[0].chunk(2, dim=-1), strict=True):
                self._part(Point(layer, name), half)

        return note

    def _activated(self, layer: int) -> Callable[..., None]:
        return lambda module, args: self._part(Point(layer, "activated"), args[0])

    def _tokens(self, point: Point, x: Tensor) -> None:
        """Whole rows [sequence, batch, hidden], of which sequence parallelism leaves this rank its share."""
        assert self._batch is not None
        flat = x.reshape(-1, x.shape[-1])
        if flat.shape[0] == self._batch.ids.numel():
            self.recorder.note(point, flat)
            return
        self._place_share(flat.shape[0])
        self.recorder.note(point, flat, kind="share")

    def _place_share(self, count: int) -> None:
        rows = self.recorder.rows()
        local = rows.row - self._tp * count
        own = (local >= 0) & (local < count)
        self.recorder.place(Rows(local[own], rows.sequence[own], rows.index[own]), "share")

    def _part(self, point: Point, x: Tensor, sharers: int = 1) -> None:
        """This rank's columns of every row, however many axes count heads and columns."""
        assert self._batch is not None
        flat = x.reshape(self._batch.ids.numel(), -1)
        start, whole = self._columns(flat.shape[1], sharers)
        self.recorder.note(point, flat, start=start, whole=whole)

    def _native_logits(self, module: Any, args: Any, out: tuple[Tensor, Any]) -> None:
        self._place_active()
        rows = self._place_scored()
        self._logits(out[0].reshape(-1, out[0].shape[-1])[rows])

    def _scored(self, batch: MicroBatch, logp: Tensor) -> None:
        self._place_active()
        if not self.recorder.traces("active"):
            return
        self.recorder.note(TARGETS, batch.targets[:, None], kind="active")
        temperature = torch.full((len(batch.targets), 1), float(self.model.temperature))
        self.recorder.note(TEMPERATURE, temperature, kind="active")
        self.recorder.note(Point(self._whole, "logp"), logp[:, None], kind="active")

    def _place_active(self) -> None:
        """Rows of active tokens are numbered as in the batch's own list of them."""
        assert self._batch is not None
        rows = self.recorder.rows()
        number = torch.full((self._batch.ids.numel(),), -1)
        number[self._batch.rows.cpu()] = torch.arange(len(self._batch.rows))
        active = number[rows.row] >= 0
        self.recorder.place(Rows(number[rows.row][active], rows.sequence[active], rows.index[active]), "active")

    def _place_scored(self) -> Tensor:
        """The hidden states' rows of traced active tokens; logits of these alone are recorded, in this order."""
        assert self._batch is not None
        active = self.recorder.rows("active")
        self.recorder.place(Rows(torch.arange(len(active)), active.sequence, active.index), "scored")
        return self._batch.rows[active.row]

    def _logits(self, logits: Tensor) -> None:
        """Logits [traced active tokens, columns] of this rank's part of the vocabulary, without its padding."""
        width, vocab = logits.shape[-1], self.model.shape.vocab
        real = max(0, min(width, vocab - self._tp * width))
        point = Point(self._whole, "logits")
        self.recorder.note(point, logits[:, :real], start=self._tp * width, whole=vocab, kind="scored")

    def _head(self, request: LinearLogpRequest) -> None:
        self._place_active()
        if self.recorder.traces("active") and request.context is not None:
            hidden, projection = request.context.hidden, request.context.projection
            with torch.no_grad():
                rows = hidden[self._place_scored()].bfloat16()
                self._logits(matmul_f32(rows, projection.weight, projection.bias))


class _WatchedScorer:
    """A scorer whose requests are seen before they are served."""

    def __init__(self, scorer: LinearLogp, watch: Callable[[LinearLogpRequest], None]) -> None:
        self._scorer, self._watch = scorer, watch

    @property
    def configured(self) -> bool:
        return self._scorer.configured

    def __call__(self, request: LinearLogpRequest, native: Any) -> Any:
        self._watch(request)
        return self._scorer(request, native)


def describe(model: Any) -> dict[str, Any]:
    """{"layer name of the site": {"route", "implementation", "parameters"}}; layer -1 for sites outside of layers."""
    found = {}
    if model.pre_process:
        found["-1 embedding"] = _facts(type(model.embedding), model.case.all_native, {})
    for layer in model.decoder.layers:
        index = layer.layer_number - 1
        attention, mlp = layer.self_attention, layer.mlp
        strict = model.case.attention == "R"
        activation = mlp.activation_func if isinstance(mlp.activation_func, torch.nn.Module) else mlp
        core = attention.core_attention
        entries: dict[str, tuple[Any, dict[str, Any]]] = {
            "input norm": (layer.input_layernorm, _eps(layer.input_layernorm)),
            "qkv projection": (attention.linear_qkv, _bias(attention.linear_qkv)),
            "q norm": (attention.q_layernorm, _eps(attention.q_layernorm)),
            "k norm": (attention.k_layernorm, _eps(attention.k_layernorm)),
            "rotary": (attention, _table_base(attention) if strict else _base(model)),
            "KV cache": (core, {}),
            "attention": (core, {"scale": float(core.scale if strict else core.softmax_scale)}),
            "output projection": (attention.linear_proj, _segments(attention.linear_proj)),
            "attention residual": (layer, {}),
            "MLP norm": (layer.pre_mlp_layernorm, _eps(layer.pre_mlp_layernorm)),
            "gate/up projection": (mlp.linear_fc1, _bias(mlp.linear_fc1)),
            "SwiGLU": (activation, {}),
            "down projection": (mlp.linear_fc2, _segments(mlp.linear_fc2)),
            "MLP residual": (layer, {}),
        }
        for name, (module, parameters) in entries.items():
            if module is not None:
                found[f"{index} {name}"] = _facts(type(module), None, parameters)
    if not model.post_process:
        return found
    norm = model.decoder.final_layernorm
    native = model.case.logp == "P"
    found["-1 final norm"] = _facts(type(norm), None, _eps(norm))
    found["-1 LM head"] = _facts(type(model.output_layer), native, {})
    found["-1 log-probability"] = _facts(LinearLogp if not native else type(model), native, {})
    return found


def _facts(kind: type, native: bool | None, parameters: dict[str, Any]) -> dict[str, Any]:
    implementation = f"{kind.__module__}.{kind.__qualname__}"
    if native is None:
        native = not implementation.startswith("samebits.")
    return {"route": "P" if native else "R", "implementation": implementation, "parameters": parameters}


def _eps(norm: Any) -> dict[str, Any]:
    return {"eps": float(norm.eps)} if getattr(norm, "eps", None) is not None else {}


def _bias(linear: Any) -> dict[str, Any]:
    return {"bias": linear.bias is not None}


def _segments(linear: Any) -> dict[str, Any]:
    return _bias(linear) | ({"segments": linear.segments} if hasattr(linear, "segments") else {})


def _table_base(attention: Any) -> dict[str, Any]:
    return {"base": table_base(*attention.table(torch.device("cpu")))}


def _base(model: Any) -> dict[str, Any]:
    return {"base": model.shape.rope_base}
