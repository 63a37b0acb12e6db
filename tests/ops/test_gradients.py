"""Gradients: the contract's formulas against finite differences in float64, the kernels against the formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from float64_form import attention as attention_definition
from float64_form import embedding as embedding_definition
from float64_form import formula
from float64_form import linear as linear_definition
from float64_form import logprob as logprob_definition
from float64_form import rms_norm as rms_norm_definition
from float64_form import rotary as rotary_definition
from float64_form import swiglu as swiglu_definition
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from samebits.bits import assert_same
from samebits.ops.attention import attention
from samebits.ops.embedding import embedding
from samebits.ops.linear import linear
from samebits.ops.logprob import linear_logp
from samebits.ops.rms_norm import add_rms_norm, rms_norm
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.swiglu import swiglu
from samebits.testing.cases import Subject, cases, left_of

EPS, FMA = 1e-6, "fma32"


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Values of bf16."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@dataclass(frozen=True)
class Op:
    """`form` in float64 and `kernel` in bf16 are the same function of the inputs that `draw(rows)` gives.

    `error`: the largest difference of a gradient, as a part of the largest element, that its roundings explain;
    `weights`: how many of the last inputs have an fp32 main_grad.
    """

    form: Callable[..., Any]
    kernel: Callable[..., Any]
    draw: Callable[[int], Sequence[Tensor]]
    error: float = 2.0**-8
    weights: int = 0


def _norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
    y, total, scale = rms_norm_definition.forward(x, None, weight, EPS)
    return y, (total, weight, scale)


def _norm_back(dy: Tensor, kept: Any) -> Sequence[Tensor]:
    x, weight, scale = kept
    dw = torch.zeros_like(weight)
    return rms_norm_definition.backward(dy, x, weight, scale, None, dw), dw


def _added(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
    y, total, scale = rms_norm_definition.forward(x, residual, weight, EPS)
    return torch.cat([y, total]), (total, weight, scale)


def _added_back(upstream: Tensor, kept: Any) -> Sequence[Tensor]:
    (dy, dsum), (x, weight, scale) = upstream.chunk(2), kept
    dw = torch.zeros_like(weight)
    dx = rms_norm_definition.backward(dy, x, weight, scale, dsum, dw)
    return dx, dx, dw


TABLE = rotary_table(8, 10_000.0, 4096)


def _turn(x: Tensor, inverse: bool = False) -> Tensor:
    cos, sin = (t.to(x.dtype) for t in TABLE)
    return rotary_definition.rotate(x, torch.arange(len(x)), cos.double(), sin.double(), inverse=inverse)


def _ids(rows: int) -> Tensor:
    """Some are masked: -100, and beyond the table."""
    return torch.tensor([0, 3, 3, -100, 1, 7, 10**12]).repeat(rows)[:rows]


def _looked_up_back(dy: Tensor, kept: Any) -> Sequence[Tensor]:
    ids, weight = kept
    dw = torch.zeros_like(weight)
    embedding_definition.backward(ids, dy, 0, dw)
    return (dw,)


def _linear_back(dy: Tensor, kept: Any) -> Sequence[Tensor]:
    x, weight, bias = kept
    dw, db = torch.zeros_like(weight), torch.zeros_like(bias)
    linear_definition.wgrad(dy, x, dw, FMA)
    linear_definition.bias_grad(dy, db)
    return linear_definition.dgrad(dy, weight, torch.float32, FMA), dw, db


def _bounds(rows: int) -> Tensor:
    return torch.tensor([0, 1, 1, rows], dtype=torch.int32)


def _attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
    ends = _bounds(len(q))
    out, m, lsum = attention_definition.forward(q, k, v, ends, ends, None, 0.4, True, FMA)
    return out, (q, k, v, out, m, lsum, ends, ends, None)


def _targets(rows: int) -> Tensor:
    return torch.arange(rows) * 5 % 9


def _scored(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Any]:
    z = logprob_definition.scaled(logprob_definition.logits_of(hidden, weight, bias, FMA), 0.7)
    lse = z.logsumexp(-1)
    return z.gather(1, _targets(len(z))[:, None])[:, 0] - lse, (hidden, weight, bias, lse)


def _scored_back(upstream: Tensor, kept: Any) -> Sequence[Tensor]:
    hidden, weight, bias, lse = kept
    dw, db = torch.zeros_like(weight), torch.zeros_like(bias)
    dh = logprob_definition.linear_backward(
        upstream, hidden, weight, bias, _targets(len(hidden)), 0.7, lse, dw, db, FMA
    )
    return dh, dw, db


OPS = {
    "rms_norm": Op(
        formula(_norm, _norm_back),
        lambda x, w: rms_norm(x, w, EPS),
        lambda rows: (randn(rows, 11), randn(11, seed=1)),
        weights=1,
    ),
    "add_rms_norm": Op(
        formula(_added, _added_back),
        lambda x, r, w: torch.cat(add_rms_norm(x, r, w, EPS)),
        # sums that bf16 holds exactly: the rounding of x + residual is no part of the formula
        lambda rows: ((2 * randn(rows, 11)).round(), (2 * randn(rows, 11, seed=2)).round(), randn(11, seed=1)),
        weights=1,
    ),
    "rotary": Op(
        formula(lambda x: (_turn(x), None), lambda dy, _: (_turn(dy, inverse=True),)),
        lambda x: rotary(x, torch.arange(len(x)), *TABLE),
        lambda rows: (randn(rows, 2, 8),),
    ),
    "swiglu": Op(
        formula(lambda x: (swiglu_definition.forward(x), x), lambda dy, x: (swiglu_definition.backward(dy, x),)),
        swiglu,
        lambda rows: (2 * randn(rows, 14),),
    ),
    "embedding": Op(
        formula(
            lambda w: (embedding_definition.forward(_ids(9), w, 0), (_ids(9), w)),
            _looked_up_back,
        ),
        lambda w: embedding(_ids(9), w),
        lambda rows: (randn(8, 5),),
        weights=1,
    ),
    "linear": Op(
        formula(
            lambda x, w, b: (linear_definition.forward(x, w, b, 2, torch.float32, FMA), (x, w, b)), _linear_back
        ),
        lambda x, w, b: linear(x, w, b, segments=2),
        lambda rows: (randn(rows, 10), randn(7, 10, seed=1), randn(7, seed=2)),
        weights=2,
    ),
    "attention": Op(
        formula(_attended, lambda dout, kept: attention_definition.backward(dout, *kept, 0.4, FMA)),
        lambda q, k, v: attention(q, k, v, _bounds(len(q)), 0.4),
        lambda rows: (randn(rows, 2, 4), randn(rows, 1, 4, seed=1), randn(rows, 1, 4, seed=2)),
        error=2.0**-6,  # P and dS are rounded to bf16
    ),
    "logprob": Op(
        formula(_scored, _scored_back),
        lambda h, w, b: linear_logp(h, w, _targets(len(h)), 0.7, b),
        lambda rows: (randn(rows, 6), randn(9, 6, seed=1), randn(9, seed=2)),
        error=2.0**-7,  # dz is rounded to bf16
        weights=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_the_formula_is_the_derivative(name: str) -> None:
    """The backward code of the definition, in float64, against finite differences of its forward code."""
    op = OPS[name]
    inputs = [x.double().requires_grad_() for x in op.draw(5)]
    assert torch.autograd.gradcheck(op.form, inputs, atol=1e-6, rtol=1e-5)


def test_a_wrong_formula_is_noticed() -> None:
    wrong = formula(_norm, lambda dy, kept: (_norm_back(dy, kept)[0] * 1.001, _norm_back(dy, kept)[1]))
    inputs = [x.double().requires_grad_() for x in OPS["rms_norm"].draw(5)]
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(wrong, inputs, atol=1e-6, rtol=1e-5)


def gradients(function: Callable[..., Any], inputs: Sequence[Tensor], weights: int = 0) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    for leaf in leaves[len(leaves) - weights :]:
        leaf.main_grad = torch.zeros(leaf.shape)  # type: ignore[attr-defined]
    y = function(*leaves)
    y.backward(randn(*y.shape, seed=7).to(y.dtype))
    return [leaf.main_grad if hasattr(leaf, "main_grad") else leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", OPS)
def test_the_kernel_is_the_formula_within_its_roundings(name: str) -> None:
    op = OPS[name]
    inputs = op.draw(256)
    exact = gradients(op.form, [x.double() for x in inputs])
    found = gradients(op.kernel, inputs, op.weights)
    for want, got in zip(exact, found, strict=True):
        assert (got.double() - want).abs().max() <= op.error * want.abs().max()


@pytest.mark.parametrize("op", ["embedding", "rms_norm", "linear", "rotary", "attention", "swiglu", "logprob"])
def test_a_second_run_gives_the_same_bits(op: str) -> None:
    """The smaller ops have their gradients in every case, the others in those that say so."""
    again = [case for case in cases(op) if "gradients" in case.name or op in ("embedding", "rotary", "swiglu")]
    assert again
    for case in again[:5]:
        for first, second in zip(left_of(case, Subject("cpu")), left_of(case, Subject("cpu")), strict=True):
            assert_same(first, second, str(case))


def test_masked_positions_may_hold_any_id() -> None:
    """-100, ids beyond the vocabulary and the ends of int64 give what any other masked id gives: nothing."""
    hidden, weight = randn(256, 24), randn(60, 24, seed=1)
    masked = torch.arange(256) % 3 == 0
    found = []
    for filler in (-100, 60, 152_064, -(2**63), 2**63 - 1):
        targets = torch.where(masked, filler, torch.arange(256) % 60)
        found.append(gradients(lambda h, w, t=targets: linear_logp(h, w, t, 1.3), (hidden, weight), 1))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert_same(a, b)
    assert not found[0][0][masked].any()
    # and the weight's gradient is that of the other rows alone
    leaf = weight.clone().requires_grad_()
    leaf.main_grad = torch.zeros(leaf.shape)  # type: ignore[attr-defined]
    y = linear_logp(hidden[~masked], leaf, (torch.arange(256) % 60)[~masked], 1.3)
    y.backward(randn(256, seed=7).float()[~masked])
    assert_same(leaf.main_grad, found[0][1])
