"""The CPU operators beside PyTorch's own on the same work, in one process, each pair taking turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from samebits import _cpu
from samebits.bench.measure import Record, interleaved
from samebits.ops.attention import attention, paged_attention
from samebits.ops.linear import linear
from samebits.ops.logprob import linear_logp
from samebits.ops.rms_norm import add_rms_norm, rms_norm
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.swiglu import swiglu

VOCABULARY = 151_936

# Why a goal can be out of reach.
BF16_PRODUCTS = (
    "the peer multiplies bf16 pairs on the matrix unit or two to a lane; fma32 fixes one fused multiply-add per "
    "product, so its ceiling is the vector units' fp32 rate"
)
FP32_PRODUCTS = "both run at the vector units' fp32 rate; the peer may order its sums freely, and widens nothing"
SAME_BYTES = "both move the same bytes; the rest is arithmetic that the contract fixes"


@dataclass(frozen=True)
class Work:
    """One piece of work: both ways to do it, the ratio wanted, and what stands in its way where it's missed."""

    what: str
    shape: str
    peer: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    goal: float | None = None
    obstacle: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.shape} | {self.peer}"


@torch.no_grad()
def measure(work: Work, seconds: float) -> Record:
    """Both ways side by side for about `seconds`, without gradients."""
    ours, theirs, repeats = interleaved(work.ours, work.theirs, seconds=seconds)
    ratio = theirs / ours
    missed = work.goal is not None and ratio < work.goal
    reason = work.obstacle if missed else None
    return Record(work.what, work.shape, work.peer, ours, theirs, ratio, repeats, work.goal, reason)


def works(threads: int) -> Iterator[Work]:
    """Every comparison, built when it's reached; samebits and torch both use `threads` threads."""
    _cpu.set_threads(threads)
    torch.set_num_threads(threads)
    for rows in (1, 8, 16, 64, 512):
        yield from _linear(rows, 4096, 4096)
    yield from _decode(requests=1, context=4096)
    yield from _decode(requests=8, context=4096)
    yield from _prefill(length=1024)
    for rows in (64, 512):
        yield from _head(rows, 1024)
    yield from _elementwise(rows=2048)


def _draw(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers as bf16, the same 2^16 over and over: time doesn't depend on them, and drawing takes long."""
    drawn = (scale * torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))).bfloat16()
    count = math.prod(shape)
    return drawn.repeat(-(-count // len(drawn)))[:count].view(shape)


def _linear(rows: int, outs: int, width: int) -> Iterator[Work]:
    x, weight = _draw(rows, width), _draw(outs, width)
    wide_x, wide_weight = x.float(), weight.float()
    shape, few = f"M={rows} N={outs} K={width}", rows <= 16

    def ours() -> Tensor:
        return linear(x, weight)

    yield Work(
        "linear", shape, "torch bf16", ours, lambda: functional.linear(x, weight),
        1.0 if few else 1.3, BF16_PRODUCTS,
    )  # fmt: skip
    yield Work(
        "linear", shape, "torch fp32", ours, lambda: functional.linear(wide_x, wide_weight),
        None if few else 0.85, FP32_PRODUCTS,
    )  # fmt: skip


def _decode(requests: int, context: int, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> Iterator[Work]:
    """One new token per request: pages of 16 in shuffled order here, contiguous keys and values for the peer."""
    page, pages = 16, requests * context // 16
    cache, q = _draw(pages, kv_heads, page, 2 * dim), _draw(requests, heads, dim)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int().view(requests, -1)
    lengths, bounds = torch.full((requests,), context, dtype=torch.int32), torch.arange(requests + 1).int()
    held = cache[table.long()].permute(0, 2, 1, 3, 4).reshape(requests, kv_heads, context, 2 * dim)
    k, v = held[..., :dim].contiguous(), held[..., dim:].contiguous()
    yield Work(
        "attention decode",
        f"B={requests} context={context} heads={heads}/{kv_heads} D={dim}",
        "torch SDPA bf16",
        lambda: paged_attention(q, cache, table, lengths, bounds, dim**-0.5),
        lambda: functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True),
        1.0,
        BF16_PRODUCTS,
    )


def _prefill(length: int, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> Iterator[Work]:
    q, k, v = _draw(length, heads, dim), _draw(length, kv_heads, dim), _draw(length, kv_heads, dim, scale=0.5)
    bounds = torch.tensor([0, length], dtype=torch.int32)
    rows = [t.transpose(0, 1)[None].contiguous() for t in (q, k, v)]
    for dtype, goal in ((torch.bfloat16, 0.7), (torch.float32, None)):
        peer_q, peer_k, peer_v = (t.to(dtype) for t in rows)

        def theirs(q: Tensor = peer_q, k: Tensor = peer_k, v: Tensor = peer_v) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        yield Work(
            "attention prefill",
            f"T={length} heads={heads}/{kv_heads} D={dim}",
            f"torch SDPA {'bf16' if dtype is torch.bfloat16 else 'fp32'}",
            lambda: attention(q, k, v, bounds, dim**-0.5),
            theirs,
            goal,
            BF16_PRODUCTS,
        )


def _head(rows: int, width: int) -> Iterator[Work]:
    hidden, weight = _draw(rows, width), _draw(VOCABULARY, width, scale=0.05)
    targets = torch.arange(rows) * 97

    def theirs() -> Tensor:
        logits = functional.linear(hidden, weight).float()
        return functional.log_softmax(logits, dim=-1).gather(1, targets[:, None])

    yield Work(
        "LM head and log-probability", f"T={rows} H={width} V={VOCABULARY}", "torch bf16 matmul, log_softmax, gather",
        lambda: linear_logp(hidden, weight, targets), theirs, 1.5, BF16_PRODUCTS,
    )  # fmt: skip
    wide = weight.float()
    yield Work(
        "LM head and log-probability", f"T={rows} H={width} V={VOCABULARY}", "torch fp32 matmul, log_softmax, gather",
        lambda: linear_logp(hidden, weight, targets),
        lambda: functional.log_softmax(functional.linear(hidden.float(), wide), dim=-1).gather(1, targets[:, None]),
    )  # fmt: skip


def _elementwise(rows: int, width: int = 4096, heads: int = 32, dim: int = 128) -> Iterator[Work]:
    x, residual, weight = _draw(rows, width), _draw(rows, width, scale=0.5), _draw(width)
    shape = f"{rows} x {width}"
    yield Work(
        "RMSNorm", shape, "torch bf16", lambda: rms_norm(x, weight, 1e-6),
        lambda: functional.rms_norm(x, (width,), weight, 1e-6), 1.0, SAME_BYTES,
    )  # fmt: skip
    yield Work(
        "add and RMSNorm", shape, "torch bf16", lambda: add_rms_norm(x, residual, weight, 1e-6),
        lambda: functional.rms_norm(x + residual, (width,), weight, 1e-6), 1.0, SAME_BYTES,
    )  # fmt: skip
    cos, sin = rotary_table(dim, 10_000.0, rows)
    wide_cos, wide_sin = (torch.cat([t, t], dim=-1).bfloat16()[:, None] for t in (cos, sin))
    q, positions = _draw(rows, heads, dim), torch.arange(rows)

    def turned() -> Tensor:
        halves = torch.cat([-q[..., dim // 2 :], q[..., : dim // 2]], dim=-1)
        return q * wide_cos + halves * wide_sin

    yield Work(
        "rotary", f"{rows} x {heads} x {dim}", "torch bf16, the usual eager form",
        lambda: rotary(q, positions, cos, sin), turned, 1.0, SAME_BYTES,
    )  # fmt: skip
    gate_up = _draw(rows, 2 * width)
    yield Work(
        "SwiGLU", shape, "torch bf16 silu and product", lambda: swiglu(gate_up),
        lambda: functional.silu(gate_up[:, :width]) * gate_up[:, width:], 1.0, SAME_BYTES,
    )  # fmt: skip
