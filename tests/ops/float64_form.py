"""The definitions run in float64 without rounding: their own code, with float64 in place of every owned step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samebits.ops.attention import reference as attention
from samebits.ops.embedding import reference as embedding
from samebits.ops.linear import reference as linear
from samebits.ops.logprob import reference as logprob
from samebits.ops.rms_norm import reference as rms_norm
from samebits.ops.rotary import reference as rotary
from samebits.ops.swiglu import reference as swiglu

DEFINITIONS = (attention, embedding, linear, logprob, rms_norm, rotary, swiglu)
SMALLER = (torch.float32, torch.bfloat16)


def _dot(a: Tensor, b: Tensor, acc: Tensor | None = None, arithmetic: str = "", backend: str = "") -> Tensor:
    product = a @ b.transpose(-1, -2)
    return product if acc is None else acc + product


# name of an owned step in a definition -> what it approximates
EXACT = {
    "fma": lambda a, b, c: a * b + c,
    "dot": _dot,
    "lane_dot": lambda a, b, lanes: (a * b).sum(-1),
    "fold_halves": lambda x: x.sum(-1),
    "exp2": torch.exp2,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "round_bf16": lambda x: x,
    "to_bf16": lambda x: x,
    "canonical_nan": lambda x: x,
    "LOG2_E": 1.4426950408889634,
    "exponent_scale": lambda scale: scale * 1.4426950408889634,
}


class _NeverSmaller(TorchFunctionMode):
    """Conversions to fp32 and bf16 keep float64; tensors that would be made in them are float64."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**(kwargs or {})}
        if func in (Tensor.float, Tensor.bfloat16) and args[0].dtype == torch.float64:
            return args[0]
        if func is Tensor.to and args[1:] and args[1] in SMALLER:
            return args[0]
        if given.get("dtype") in SMALLER:
            given["dtype"] = torch.float64
        return func(*args, **given)


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, the functions of every `reference` module compute in float64, given float64."""
    with ExitStack() as stack:
        for module in DEFINITIONS:
            for name in EXACT.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, EXACT[name]))
        stack.enter_context(_NeverSmaller())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        yield


def formula(forward: Any, backward: Any) -> Any:
    """A differentiable function whose forward and backward are those of a definition, in float64.

    `forward(*inputs)` returns (output, what backward needs); `backward(upstream, kept)` returns a gradient per input.
    """

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            with in_float64():
                y, ctx.kept = forward(*inputs)
            return y

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
            with in_float64():
                return tuple(backward(upstream, ctx.kept))

    return Formula.apply
