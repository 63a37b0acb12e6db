"""What every public function refuses, and what a process may set without moving a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from samebits.arithmetic import dot
from samebits.bits import assert_same
from samebits.ops.attention import attention, paged_attention
from samebits.ops.embedding import embedding
from samebits.ops.linear import dgrad, linear, wgrad
from samebits.ops.logprob import finish, finish_logp, linear_logp, logprob, lse_state
from samebits.ops.rms_norm import add_rms_norm, rms_norm
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.sample import sample
from samebits.ops.sample_support import Kept, Limits, kept_linear_logp, kept_logprob, sample_kept, sample_support
from samebits.ops.swiglu import swiglu

ROWS, WIDTH = 256, 32
_DRAW = torch.Generator().manual_seed(4)
X, WEIGHT = (torch.randn(n, WIDTH, generator=_DRAW).bfloat16() for n in (ROWS, 64))
HEADS = X.view(ROWS, 2, WIDTH // 2)
LOGITS, IDS = torch.randn(ROWS, 64, generator=_DRAW), torch.arange(ROWS) % 64
COS, SIN = rotary_table(WIDTH // 2, 1e4, ROWS)
LENGTHS = torch.tensor([0, 100, ROWS], dtype=torch.int32)
KEPT = Kept(torch.ones(ROWS, dtype=torch.int64), IDS)


def attended() -> Tensor:
    q = HEADS.clone().requires_grad_()
    attention(q, HEADS, HEADS, LENGTHS, 0.25).backward(HEADS)
    assert q.grad is not None
    return q.grad


def weight_gradient() -> Tensor:
    buffer = torch.zeros(64, WIDTH, dtype=torch.float32, device="cpu")
    wgrad(LOGITS, X, buffer)
    return buffer


RESULTS: dict[str, Callable[[], Tensor]] = {
    "attention": attended,
    "dot": lambda: dot(X, WEIGHT, backend="cpu"),
    "dot by definition": lambda: dot(X[:4], WEIGHT),
    "dot by the definition of sm90": lambda: dot(X[:4], WEIGHT, arithmetic="sm90"),
    "embedding": lambda: embedding(IDS, WEIGHT),
    "linear": lambda: linear(X, WEIGHT),
    "dgrad": lambda: dgrad(LOGITS, WEIGHT),
    "wgrad": weight_gradient,
    "linear_logp": lambda: linear_logp(X, WEIGHT, IDS),
    "logprob": lambda: logprob(LOGITS, IDS),
    "kept_linear_logp": lambda: kept_linear_logp(X, WEIGHT, IDS, KEPT),
    "kept_logprob": lambda: kept_logprob(LOGITS, IDS[:, None], 1.0, KEPT),
    "rms_norm": lambda: rms_norm(X, WEIGHT[0], 1e-6),
    "rms_norm by definition": lambda: rms_norm(X, WEIGHT[0], 1e-6, backend="reference"),
    "rotary": lambda: rotary(HEADS, torch.arange(ROWS, device="cpu"), COS, SIN),
    "sample": lambda: sample(LOGITS, 1.0, IDS, IDS),
    "swiglu": lambda: swiglu(X),
}


@pytest.fixture
def other_defaults() -> Iterator[None]:
    """A process that makes tensors of another type elsewhere."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    yield
    torch.set_default_device("cpu")
    torch.set_default_dtype(torch.float32)


WANTED = {name: result() for name, result in RESULTS.items()}


@pytest.mark.usefixtures("other_defaults")
@pytest.mark.parametrize("name", RESULTS)
def test_the_defaults_of_a_process_do_not_matter(name: str) -> None:
    assert_same(RESULTS[name](), WANTED[name])


@pytest.mark.usefixtures("other_defaults")
def test_a_support_is_found_under_any_default_type() -> None:
    torch.set_default_device("cpu")
    assert sample_support(LOGITS, 1.0, Limits.of(ROWS, top_k=5)).counts.tolist() == [5] * ROWS


def elsewhere(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


AWAY = elsewhere(WEIGHT)
POSITIONS = torch.arange(ROWS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(X, AWAY), "linear: backend 'cpu' takes tensors on the CPU, got one on meta"),
        (lambda: linear(elsewhere(X), AWAY, backend="cpu"), "takes tensors on the CPU"),
        (lambda: linear(X, WEIGHT, AWAY[:, 0].contiguous()), "takes tensors on the CPU"),
        (lambda: dgrad(LOGITS, AWAY), "takes tensors on the CPU"),
        (lambda: wgrad(X, X, torch.zeros(WIDTH, WIDTH, device="meta")), "takes tensors on the CPU"),
        (lambda: rms_norm(X, AWAY[0], 1e-6), "takes tensors on the CPU"),
        (lambda: add_rms_norm(X, elsewhere(X), WEIGHT[0], 1e-6), "takes tensors on the CPU"),
        (lambda: rotary(HEADS, POSITIONS, elsewhere(COS), SIN), "takes tensors on the CPU"),
        (lambda: embedding(elsewhere(IDS), WEIGHT), "takes tensors on the CPU"),
        (lambda: attention(HEADS, HEADS, elsewhere(HEADS), LENGTHS, 0.25), "takes tensors on the CPU"),
        (lambda: linear_logp(X, AWAY, IDS), "takes tensors on the CPU"),
        (lambda: logprob(LOGITS, elsewhere(IDS)), "takes tensors on the CPU"),
        (lambda: sample(LOGITS, 1.0, elsewhere(IDS), IDS), "takes tensors on the CPU"),
        (lambda: dgrad(LOGITS, WEIGHT, torch.float16), "dtype must be bfloat16 or float32, got torch.float16"),
        (lambda: linear(X, WEIGHT[:0]), r"weight must have at least one row, got \[0, 32\]"),
        (lambda: dgrad(LOGITS, WEIGHT[:, :0]), "with K >= 1"),
        (lambda: wgrad(X, X[:, :0], torch.zeros(WIDTH, 0)), "with K >= 1"),
        (lambda: linear_logp(X[:0], WEIGHT[:0], IDS[:0]), "want 1 to 1048576 rows of weight, got 0"),
        (lambda: attention(HEADS[:, :0], HEADS, HEADS, LENGTHS, 0.25), "0 query heads are not a multiple"),
        (
            lambda: paged_attention(
                HEADS[:1], torch.zeros(2, 2, 0, WIDTH).bfloat16(), LENGTHS[None], LENGTHS[1:2], LENGTHS[:2], 0.25
            ),
            "a page must hold at least one token",
        ),
        (lambda: rotary(HEADS[..., 1:], POSITIONS, COS, SIN), "D must be even"),
        (lambda: rotary(HEADS, POSITIONS, COS, SIN.double()), "sin must be contiguous float32"),
        (lambda: rotary(HEADS, POSITIONS, COS, SIN[:9]), "sin must be contiguous float32"),
        (lambda: embedding(IDS, WEIGHT[0]), r"bfloat16 \[rows, H\], got torch.bfloat16 \[32\]"),
        (lambda: finish(lse_state(LOGITS).int()), r"states must be int64 \[T, 5\], got torch.int32"),
        (lambda: finish(lse_state(LOGITS)[:, :4]), r"states must be int64 \[T, 5\]"),
        (lambda: finish_logp(lse_state(LOGITS), LOGITS[:2, 0]), r"z must be float32 \[256\], got torch.float32 \[2\]"),
        (lambda: sample_kept(LOGITS, 1.0, IDS[:, None], IDS, KEPT), r"seeds must be contiguous int64 \[256\]"),
        (lambda: kept_logprob(LOGITS, IDS, 1.0, KEPT), r"targets must be contiguous int64 \[256, N\]"),
        (lambda: kept_linear_logp(X.double(), WEIGHT, IDS, KEPT), "hidden must be bfloat16 or float32"),
    ],
)
def test_a_call_that_no_kernel_serves_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
