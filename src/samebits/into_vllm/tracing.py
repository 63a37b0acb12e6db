"""Tracing one worker: which row of a batch holds which token, and what every module wrote for it.

Modules are watched by forward hooks, the straight decoder by kernels that record. Of a decoder that vLLM compiled
only its ends can be seen: token ids, positions, the final hidden states, logits and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.outputs import SamplerOutput

from samebits.into_vllm.kernel_tap import TracedKernels
from samebits.into_vllm.kv_view import note_keys_and_values
from samebits.into_vllm.loader import WorkerState
from samebits.into_vllm.trace_facts import describe
from samebits.trace import Entry, Point, Recorder, Rows
from samebits.trace.points import IDS, POSITIONS, TARGETS, TEMPERATURE


class WorkerTrace:
    """Records sequences; all of them get their own tokens instead of drawn ones.

    `traced` maps the number of a sequence to the index of its last token that is of interest.

    A request must be named after the number of its sequence. `close` takes every hook back.
    """

    def __init__(
        self,
        runner: Any,
        state: WorkerState,
        traced: Mapping[int, int],
        keep: Collection[Point],
    ) -> None:
        self._runner, self._state = runner, state
        self._traced = traced
        self._model: Any = runner.model
        inner = self._model.model
        self._layers = len(inner.layers)
        self.recorder = Recorder(keep)
        self._layer = 0
        self._last: list[tuple[int, int]] = []  # of each request of the batch: its sequence, the index of its last row
        self._handles: list[Any] = [
            self._model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            self._model.register_forward_hook(self._after_model),
            self._model.logits_processor.register_forward_hook(self._after_logits),
            runner.sampler.register_forward_hook(self._after_sampler, with_kwargs=True),
        ]
        decoder = state.decoder
        if decoder is not None:
            decoder.kernels = TracedKernels(decoder, self.recorder, decoder.kernels)
        elif not state.plan.compiled:
            for block in state.fused:
                block.remove()
            self._watch_modules(inner)

    def facts(self) -> dict[str, Any]:
        """Of every site that this worker computes: its code, its route and its parameters."""
        return describe(self._state, self._runner.sampler)

    def take(self) -> list[Entry]:
        """What was recorded since the last call."""
        return self.recorder.take()

    def close(self) -> None:
        """Stop recording; the worker is as it was."""
        for handle in self._handles:
            handle.remove()
        for block in self._state.fused:
            block.install()
        decoder = self._state.decoder
        if decoder is not None and isinstance(decoder.kernels, TracedKernels):
            decoder.kernels = decoder.kernels.kernels

    def _before_model(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        described: Any = get_forward_context().attn_metadata
        self._last = []
        if not described:
            self.recorder.place(_rows([]))
            return
        paged = next(iter(described.values()))
        starts, lengths = paged.query_start_loc.tolist(), paged.seq_lens.tolist()
        tokens, last = [], []
        for at, name in enumerate(self._runner.input_batch.req_ids):
            sequence = int(name.rsplit("-", 1)[0])
            count = starts[at + 1] - starts[at]
            self._last.append((sequence, lengths[at] - 1))
            if sequence in self._traced:
                first, end = lengths[at] - count, min(lengths[at], self._traced[sequence] + 1)
                tokens += [(starts[at] + index - first, sequence, index) for index in range(first, end)]
                last += [(at, sequence, end - 1)] if end == lengths[at] else []
        self.recorder.place(_rows(tokens))
        self.recorder.place(_rows(last), "last")
        self.recorder.note(IDS, kwargs["input_ids"].long()[:, None])
        self.recorder.note(POSITIONS, kwargs["positions"].long()[:, None])

    def _after_model(self, model: Any, args: Any, hidden: Tensor) -> None:
        self.recorder.note(Point(self._layers, "normed"), hidden)

    def _after_logits(self, module: Any, args: Any, logits: Tensor | None) -> None:
        if logits is not None and self._last:
            self.recorder.note(Point(self._layers, "logits"), logits, kind="last")

    def _after_sampler(self, sampler: Any, args: Any, kwargs: dict[str, Any], out: SamplerOutput) -> None:
        scored = out.logprobs_tensors
        if not self._last or scored is None:
            return
        rows = len(self._last)
        given = kwargs["sampling_metadata"].temperature
        temperature = torch.zeros(rows) if given is None else given[:rows].float()
        temperature = torch.where(temperature > 0, temperature, 1.0)
        scores = scored.logprobs[:rows, :1]
        self.recorder.note(TARGETS, out.sampled_token_ids[:rows].long(), kind="last")
        self.recorder.note(TEMPERATURE, temperature[:, None], kind="last")
        self.recorder.note(Point(self._layers, "logp"), scores, kind="last")
        self.recorder.collect()

    def _watch_modules(self, inner: Any) -> None:
        for index, layer in enumerate(inner.layers):
            attention, mlp = layer.self_attn, layer.mlp
            self._after(layer.input_layernorm, self._norm(index, "stream", "normed"))
            self._after(attention.qkv_proj, self._qkv(index, attention))
            for which, rank, ranks in _head_norms(attention):
                module = getattr(attention, f"{which}_norm")
                self._after(module, self._head_norm(Point(index, f"{which}_normed"), rank, ranks))
            self._after(attention.attn, self._attention(index, attention))
            self._after(attention.o_proj, self._first(Point(index, "attn_out")))
            self._after(layer.post_attention_layernorm, self._norm(index, "stream_mid", "ffn_normed"))
            self._after(mlp.gate_up_proj, self._gate_up(index))
            self._after(mlp.act_fn, self._columns(Point(index, "activated"), mlp.down_proj))
            self._after(mlp.down_proj, self._first(Point(index, "ffn_out")))
        self._after(inner.layers[0].self_attn.rotary_emb, self._rotary(inner))
        self._after(inner.norm, self._norm(self._layers, "stream", None))

    def _after(self, module: Any, note: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_hook(note))

    def _norm(self, layer: int, stream: str, normed: str | None) -> Callable[..., None]:
        def note(module: Any, args: tuple[Any, ...], out: Any) -> None:
            # vLLM's own norm with a residual works in place, so what it returns is read and not what it was given
            y, x = out if isinstance(out, tuple) else (out, args[0])
            self.recorder.note(Point(layer, stream), x)
            if normed:
                self.recorder.note(Point(layer, normed), y)

        return note

    def _qkv(self, layer: int, attention: Any) -> Callable[..., None]:
        def note(module: Any, args: Any, out: tuple[Tensor, Any]) -> None:
            self._layer = layer
            sizes = [attention.q_size, attention.kv_size, attention.kv_size]
            for (name, rank, ranks), part in zip(_heads(attention), out[0].split(sizes, dim=-1), strict=True):
                self._part(Point(layer, name), part, rank, ranks)

        return note

    def _rotary(self, inner: Any) -> Callable[..., None]:
        def note(module: Any, args: Any, out: tuple[Tensor, Tensor]) -> None:
            # one module serves all layers
            heads = _heads(inner.layers[self._layer].self_attn)
            for (name, rank, ranks), turned in zip(heads, out, strict=False):
                self._part(Point(self._layer, f"{name}_turned"), turned, rank, ranks)

        return note

    def _attention(self, layer: int, attention: Any) -> Callable[..., None]:
        (_, rank, ranks), (_, kv_rank, kv_ranks), _ = _heads(attention)
        strict = self._state.plan.route("attention") == "R"

        def note(module: Any, args: Any, out: Tensor) -> None:
            # vLLM's own backend keeps pages in an order of its own, so what it reads back is not looked at
            if strict and self.recorder.traces():
                note_keys_and_values(self.recorder, layer, module, kv_rank, kv_ranks)
            self._part(Point(layer, "mixed"), out, rank, ranks)

        return note

    def _head_norm(self, point: Point, rank: int, ranks: int) -> Callable[..., None]:
        def note(module: Any, args: Any, out: Tensor) -> None:
            self._part(point, out.reshape(out.shape[0], -1), rank, ranks)

        return note

    def _gate_up(self, layer: int) -> Callable[..., None]:
        def note(module: Any, args: Any, out: tuple[Tensor, Any]) -> None:
            for name, half in zip(("gate", "up"), out[0].chunk(2, dim=-1), strict=True):
                self._part(Point(layer, name), half, module.tp_rank, module.tp_size)

        return note

    def _columns(self, point: Point, split: Any) -> Callable[..., None]:
        return lambda module, args, out: self._part(point, out, split.tp_rank, split.tp_size)

    def _first(self, point: Point) -> Callable[..., None]:
        return lambda module, args, out: self.recorder.note(point, out[0])

    def _part(self, point: Point, part: Tensor, rank: int, ranks: int) -> None:
        width = part.shape[-1]
        self.recorder.note(point, part, start=rank * width, whole=ranks * width)


def _heads(attention: Any) -> list[tuple[str, int, int]]:
    """Name, rank and ranks of the split of queries, keys and values."""
    qkv = attention.qkv_proj
    kv = (qkv.tp_rank // qkv.num_kv_head_replicas, qkv.tp_size // qkv.num_kv_head_replicas)
    return [("q", qkv.tp_rank, qkv.tp_size), ("k", *kv), ("v", *kv)]


def _head_norms(attention: Any) -> list[tuple[str, int, int]]:
    return [entry for entry in _heads(attention)[:2] if hasattr(attention, f"{entry[0]}_norm")]


def _rows(found: Sequence[tuple[int, int, int]]) -> Rows:
    columns = torch.tensor(list(found), dtype=torch.int64).reshape(-1, 3)
    return Rows(*(columns[:, at].contiguous() for at in range(3)))
