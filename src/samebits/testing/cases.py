"""The conformance cases: one table of op x case, each a pair of computations that must give the same bits.

A *reference* case compares a backend with the definition; an *invariance* case compares a backend with itself
under another schedule (rows one by one, another packing, other pages). `run(backend)` computes both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.bits import Difference, first_difference
from samebits.ops.attention import BACKENDS as ATTENTION_BACKENDS
from samebits.ops.attention import attention, paged_attention, write_kv
from samebits.ops.embedding import embedding
from samebits.ops.linear import linear, linear_partial, matmul_f32
from samebits.ops.logprob import linear_logp, logprob, lse_state
from samebits.ops.rms_norm import BACKENDS as NORM_BACKENDS
from samebits.ops.rms_norm import add_rms_norm, rms_norm
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.sample import sample
from samebits.ops.swiglu import swiglu

ROWS = 256


@dataclass(frozen=True)
class Case:
    """`left` and `right` return tensors that must agree in every bit; `by_definition`: right is the reference."""

    op: str
    name: str
    left: Callable[[], list[Tensor]]
    right: Callable[[], list[Tensor]]
    by_definition: bool = False

    def __str__(self) -> str:
        return f"{self.op} {self.name}"


def difference(case: Case) -> Difference | None:
    """The first difference between the two sides of a case, or None."""
    left, right = case.left(), case.right()
    if len(left) != len(right):
        raise ValueError(f"{case}: {len(left)} tensors against {len(right)}")
    for a, b in zip(left, right, strict=True):
        found = first_difference(a, b)
        if found is not None:
            return found
    return None


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Seeded normal numbers as bf16."""
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor, weights: int = 0) -> list[Tensor]:
    """[output, gradient of each input] for a seeded upstream gradient of the output's dtype.

    The last `weights` inputs have an fp32 main_grad that is not empty, and that is what is returned for them:
    a gradient that was rounded to bf16 would hide most faults.
    """
    leaves = [t.clone().requires_grad_() for t in inputs]
    for leaf in leaves[len(leaves) - weights :]:
        leaf.main_grad = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(98))  # type: ignore[attr-defined]
    y = function(*leaves)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(99)).to(y.dtype)
    y.backward(upstream)
    gradients: list[Tensor] = [getattr(leaf, "main_grad", leaf.grad) for leaf in leaves]
    return [y.detach(), *gradients]


def _against_reference(op: str, name: str, compute: Callable[[str], list[Tensor]]) -> Case:
    return Case(op, name, lambda: compute("cpu"), lambda: compute("reference"), by_definition=True)


def _rms_norm_cases() -> Iterator[Case]:
    for width in (64, 127, 1000):
        x, residual = randn(ROWS, width), randn(ROWS, width, seed=1)
        weight = (1 + 0.3 * randn(width, seed=2).float()).bfloat16()

        def forward(backend: str, x=x, residual=residual, weight=weight) -> list[Tensor]:
            both = add_rms_norm(x, residual, weight, 1e-6, backend=backend)
            # 1 / root mean square in fp32: the rounded outputs would hide how it was summed
            scale = NORM_BACKENDS[backend].forward(x, residual, weight, 1e-6)[2]
            return [rms_norm(x, weight, 1e-6, backend=backend), *both, scale]

        def backward(backend: str, x=x, weight=weight) -> list[Tensor]:
            return with_gradients(lambda a, w: rms_norm(a, w, 1e-6, backend=backend), x, weight, weights=1)

        def by_rows(x=x, weight=weight) -> list[Tensor]:
            return [torch.cat([rms_norm(row[None], weight, 1e-6) for row in x])]

        yield _against_reference("rms_norm", f"width{width}", forward)
        yield _against_reference("rms_norm", f"width{width}-backward", backward)
        yield Case(
            "rms_norm", f"width{width}-one-row-at-a-time",
            lambda x=x, weight=weight: [rms_norm(x, weight, 1e-6)], by_rows,
        )  # fmt: skip

    # dx is rounded to bf16, which hides a last bit of fp32 in all but one of some 10^5 elements: a large case
    big, gain = randn(4096, 256, seed=3), randn(256, seed=2)
    yield _against_reference(
        "rms_norm",
        "rows4096-backward",
        lambda b: with_gradients(lambda a, w: rms_norm(a, w, 1e-6, backend=b), big, gain, weights=1),
    )


def _elementwise_cases() -> Iterator[Case]:
    # a last bit of fp32 shows in one of some 10^5 outputs rounded to bf16, so these cases are large
    cos, sin = rotary_table(64, 10_000.0, 4096)
    x, positions = randn(4096, 6, 64), torch.arange(4096)
    yield _against_reference(
        "rotary", "width64", lambda b: with_gradients(lambda t: rotary(t, positions, cos, sin, backend=b), x)
    )
    gate_up = randn(4096, 2 * 300, scale=4.0)
    yield _against_reference("swiglu", "width300", lambda b: with_gradients(lambda t: swiglu(t, backend=b), gate_up))
    ids = torch.randint(0, 60, (ROWS,), generator=torch.Generator().manual_seed(2))
    table = randn(40, 72)
    yield _against_reference(
        "embedding",
        "rows40",
        lambda b: with_gradients(lambda w: embedding(ids, w, start=10, backend=b), table, weights=1),
    )


def _linear_cases() -> Iterator[Case]:
    for rows, outs, width, segments in ((ROWS, 100, 128, 1), (ROWS, 33, 67, 1), (ROWS, 64, 256, 4), (5, 300, 200, 2)):
        x, weight, bias = randn(rows, width), randn(outs, width, seed=1), randn(outs, seed=2)

        def forward(backend: str, x=x, weight=weight, bias=bias, segments=segments) -> list[Tensor]:
            rounded = linear(x, weight, bias, segments=segments, backend=backend)
            return [rounded, linear_partial(x, weight, segments=segments, backend=backend)]

        def backward(backend: str, x=x, weight=weight, bias=bias, segments=segments) -> list[Tensor]:
            return with_gradients(lambda *t: linear(*t, segments=segments, backend=backend), x, weight, bias, weights=2)

        def by_rows(x=x, weight=weight) -> list[Tensor]:
            return [torch.cat([matmul_f32(row[None], weight) for row in x])]

        name = f"rows{rows}-outputs{outs}-width{width}-segments{segments}"
        yield _against_reference("linear", name, forward)
        yield _against_reference("linear", f"{name}-backward", backward)
        yield Case("linear", f"{name}-one-row-at-a-time", lambda x=x, weight=weight: [matmul_f32(x, weight)], by_rows)


def _packed(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = sum(lengths)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    q, k, v = randn(total, heads, dim), randn(total, kv_heads, dim, seed=1), randn(total, kv_heads, dim, seed=2)
    return q, k, v, bounds


def _paged(lengths: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, page: int, piece: int) -> list[Tensor]:
    """The attention of packed sequences, fed to the paged kernel in pieces of `piece` tokens per sequence."""
    kv_heads, dim = k.shape[1:]
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(4))
    cache = torch.full((sum(counts) + 1, kv_heads, page, 2 * dim), float("nan"), dtype=torch.bfloat16)
    tables = torch.full((len(lengths), max(counts)), 10**6, dtype=torch.int32)
    for row, pages in enumerate(order[: sum(counts)].split(counts)):
        tables[row, : len(pages)] = pages.int()
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    out = torch.empty_like(q)
    for begin in range(0, max(lengths), piece):
        live = [i for i, length in enumerate(lengths) if begin < length]
        rows = [torch.arange(begin, min(begin + piece, lengths[i])) for i in live]
        flat = torch.cat([r + starts[i] for r, i in zip(rows, live, strict=True)])
        slots = torch.cat([tables[i, r // page].long() * page + r % page for r, i in zip(rows, live, strict=True)])
        write_kv(k[flat], v[flat], cache, slots)
        bounds = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()], dtype=torch.int32)
        seen = torch.tensor([begin + len(r) for r in rows], dtype=torch.int32)
        out[flat] = paged_attention(q[flat], cache, tables[live], seen, bounds, dim**-0.5)
    return [out]


def _attention_cases() -> Iterator[Case]:
    for lengths, heads, kv_heads, dim in (((1, 150, 64), 4, 2, 64), ((600,), 2, 1, 32), ((90, 20), 4, 1, 80)):
        q, k, v, bounds = _packed(lengths, heads, kv_heads, dim)
        scale = dim**-0.5

        def forward(backend: str, q=q, k=k, v=v, bounds=bounds, scale=scale) -> list[Tensor]:
            statistics = ATTENTION_BACKENDS[backend].forward(q, k, v, bounds, bounds, None, scale, True, "fma32")
            return [attention(q, k, v, bounds, scale, backend=backend), *statistics[1:]]

        def backward(backend: str, q=q, k=k, v=v, bounds=bounds, scale=scale) -> list[Tensor]:
            return with_gradients(lambda *t: attention(*t, bounds, scale, backend=backend), q, k, v)

        name = f"lengths{'+'.join(map(str, lengths))}-heads{heads}x{kv_heads}-dim{dim}"
        yield _against_reference("attention", name, forward)
        if max(lengths) <= 150:
            yield _against_reference("attention", f"{name}-backward", backward)
        for page, piece in ((16, 97), (3, 40)):
            yield Case(
                "attention", f"{name}-pages-of-{page}-pieces-of-{piece}",
                lambda forward=forward: forward("cpu")[:1],
                lambda a=(lengths, q, k, v, page, piece): _paged(*a),
            )  # fmt: skip
    decode = _packed((70,), 4, 2, 64)
    yield Case(
        "attention", "one-token-at-a-time",
        lambda: [attention(*decode, 0.125)], lambda: _paged((70,), *decode[:3], 16, 1),
    )  # fmt: skip


def _logprob_cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(3)
    for vocab, temperature in ((500, 1.0), (512, 0.7), (3000, 1.3)):
        logits = 6 * torch.randn(ROWS, vocab, generator=generator)
        targets = torch.randint(0, vocab, (ROWS,), generator=generator)

        def scores(backend: str, logits=logits, targets=targets, temperature=temperature) -> list[Tensor]:
            return [
                logprob(logits, targets, temperature, backend=backend),
                lse_state(logits, temperature, backend=backend),
            ]

        order = torch.randperm(vocab, generator=generator)
        yield _against_reference("logprob", f"vocabulary{vocab}-temperature{temperature}", scores)
        yield Case(
            "logprob", f"vocabulary{vocab}-temperature{temperature}-permuted",
            lambda logits=logits, t=temperature: [lse_state(logits, t)],
            lambda logits=logits, t=temperature, order=order: [lse_state(logits[:, order].contiguous(), t)],
        )  # fmt: skip
    hidden, weight = randn(ROWS, 96), randn(700, 96, seed=1, scale=0.3)
    targets = torch.randint(0, 650, (ROWS,), generator=generator)
    for temperature in (1.0, 0.7):

        def fused(backend: str, temperature=temperature) -> list[Tensor]:
            return with_gradients(
                lambda h, w: linear_logp(h, w, targets, temperature, real_vocab=650, backend=backend),
                hidden,
                weight,
                weights=1,
            )

        def on_logits(temperature=temperature) -> list[Tensor]:
            return [logprob(matmul_f32(hidden, weight[:650].contiguous()), targets, temperature)]

        yield _against_reference("logprob", f"fused-temperature{temperature}", fused)
        yield Case(
            "logprob", f"fused-temperature{temperature}-like-logits",
            lambda t=temperature: [linear_logp(hidden, weight, targets, t, real_vocab=650)], on_logits,
        )  # fmt: skip


def _sample_cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(8)
    logits = 3 * torch.randn(ROWS, 400, generator=generator)
    seeds = torch.randint(0, 2**62, (ROWS,), generator=generator)
    positions = torch.arange(ROWS) % 50
    for temperature in (0.0, 0.7, 1.0):

        def draw(backend: str, temperature=temperature) -> list[Tensor]:
            return [sample(logits, temperature, seeds, positions, backend=backend)]

        def by_rows(temperature=temperature) -> list[Tensor]:
            rows = [sample(logits[i : i + 1], temperature, seeds[i : i + 1], positions[i : i + 1]) for i in range(ROWS)]
            return [torch.cat(rows)]

        yield _against_reference("sample", f"temperature{temperature}", draw)
        yield Case("sample", f"temperature{temperature}-one-row-at-a-time", lambda draw=draw: draw("cpu"), by_rows)
    yield _against_reference(
        "sample", "greedy-with-ties", lambda b: [sample(logits.round(), 0.0, seeds, positions, backend=b)]
    )


CASES: tuple[Case, ...] = (
    *_rms_norm_cases(),
    *_elementwise_cases(),
    *_linear_cases(),
    *_attention_cases(),
    *_logprob_cases(),
    *_sample_cases(),
)
