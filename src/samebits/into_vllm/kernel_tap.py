"""The kernels of the straight decoder, recording what each one wrote right after it ran.

A kernel is told apart by the weight that it is called with; rotary, cache, attention and SwiGLU have none and belong
to the layer of the weight before them.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samebits.into_vllm.kv_view import note_keys_and_values
from samebits.trace import Point, Recorder

if TYPE_CHECKING:
    from samebits.into_vllm.straight import StraightDecoder


class TracedKernels:
    """Takes the place of `StraightDecoder.kernels`; every call goes on to `kernels` with the same arguments."""

    def __init__(self, decoder: StraightDecoder, recorder: Recorder, kernels: Any) -> None:
        self.kernels = kernels
        self._recorder = recorder
        self._attention = decoder.attention
        self._layer = 0
        self._turned = 0
        self._tokens = 0
        self._outputs: dict[int, tuple[int, str, str]] = {}  # weight -> layer, point of the stream, point written
        for layer, w in enumerate(decoder.layers):
            self._outputs |= {
                w.input_norm: (layer, "stream", "normed"),
                w.q: (layer, "", "q"),
                w.k: (layer, "", "k"),
                w.v: (layer, "", "v"),
                w.o: (layer, "", "attn_out"),
                w.mlp_norm: (layer, "stream_mid", "ffn_normed"),
                w.gate_up: (layer, "", "gate_up"),
                w.down: (layer, "", "ffn_out"),
            }
            if w.q_norm:
                self._outputs |= {w.q_norm: (layer, "", "q_normed"), w.k_norm: (layer, "", "k_normed")}
        # what the final norm writes is what the model returns, and recorded there
        self._outputs[decoder.final_norm] = (len(decoder.layers), "stream", "")

    def embedding_forward(self, *args: Any) -> None:
        self.kernels.embedding_forward(*args)
        # layer 0 reads it as its stream, and records it there

    def rms_norm_forward(self, *args: Any) -> None:
        self.kernels.rms_norm_forward(*args)
        weight, y, stream, rows, width = args[4], args[6], args[7], args[9], args[10]
        self._layer, stream_name, name = self._outputs[weight]
        self._turned = 0
        if name.endswith("_normed") and name[0] in "qk":
            heads = rows // self._tokens
            self._note(name, y, self._tokens, heads * width)
            return
        self._tokens = rows
        self._note(stream_name, stream, rows, width)
        if name:
            self._note(name, y, rows, width)

    def linear_forward(self, *args: Any) -> None:
        self.kernels.linear_forward(*args)
        weight, y, rows, width = args[2], args[5], args[7], args[8]
        _, _, name = self._outputs[weight]
        if name != "gate_up":
            self._note(name, y, rows, width)
            return
        for half, part in zip(("gate", "up"), _view(y, rows, width).chunk(2, dim=1), strict=True):
            self._recorder.note(Point(self._layer, half), part)

    def rotary(self, *args: Any) -> None:
        self.kernels.rotary(*args)
        y, rows, heads, dim = args[6], args[7], args[8], args[9]
        self._note(("q_turned", "k_turned")[self._turned], y, rows, heads * dim)
        self._turned += 1

    def write_kv(self, *args: Any) -> None:
        self.kernels.write_kv(*args)

    def attention_paged(self, *args: Any) -> None:
        self.kernels.attention_paged(*args)
        rows, heads, dim, y = args[-6], args[-5], args[-3], args[-1]
        if self._recorder.traces():
            note_keys_and_values(self._recorder, self._layer, self._attention[self._layer], 0, 1)
        self._note("mixed", y, rows, heads * dim)

    def swiglu_forward(self, *args: Any) -> None:
        self.kernels.swiglu_forward(*args)
        self._note("activated", args[2], args[3], args[4])

    def _note(self, name: str, address: int, rows: int, width: int) -> None:
        if self._recorder.traces():
            self._recorder.note(Point(self._layer, name), _view(address, rows, width))


def _view(address: int, rows: int, width: int) -> Tensor:
    """bf16 [rows, width] at an address, without a copy."""
    memory = (ctypes.c_uint16 * (rows * width)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(rows, width)
