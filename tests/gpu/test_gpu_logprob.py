"""The Triton log-probability kernels against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samebits.backends import device_arithmetic
from samebits.bits import assert_same, first_difference
from samebits.ops.logprob import BACKENDS, finish, finish_logp, linear_logp, logprob, lse_state

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run `python -m pytest tests/gpu` on a machine with one"
)

INF = float("inf")


def logits_of(rows: int, columns: int, scale: float = 6.0) -> Tensor:
    return (scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))).cuda()


def corners() -> Tensor:
    """Rows that no ordinary model gives: all of fp32, infinities, NaN, ties, one finite value."""
    g = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (256, 700), generator=g).to(torch.int32).view(torch.float32)
    wide = torch.where(bits.isfinite(), bits, 1.0)
    moderate = torch.randn(64, 700, generator=g) * torch.logspace(-3, 8, 64)[:, None]
    special = torch.zeros(8, 700)
    special[0, 5], special[1, 6], special[2], special[3, :699] = INF, float("nan"), -INF, -INF
    special[4, ::2], special[5], special[6], special[7, 9] = -INF, 3.5, -1e30, 8.0e8
    return torch.cat([wide, moderate, special]).cuda()


@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"])
@pytest.mark.parametrize(("rows", "columns"), [(300, 700), (256, 5000), (1, 151_936), (7, 32_000)])
def test_from_logits(rows: int, columns: int, temperature: float | str) -> None:
    logits = logits_of(rows, columns)
    warmth = torch.linspace(0.3, 2.0, rows).cuda() if temperature == "rows" else temperature
    targets = torch.randint(-1, columns, (rows, 3), generator=torch.Generator().manual_seed(1)).cuda()
    state = lse_state(logits, warmth)
    assert_same(state, lse_state(logits, warmth, backend="reference"), "state")
    assert_same(finish(state), finish(state, backend="reference"), "log-sum-exp")
    assert_same(logprob(logits, targets, warmth), logprob(logits, targets, warmth, backend="reference"), "logp")
    z = logits[:, 0].contiguous()
    assert_same(finish_logp(state, z), finish_logp(state, z, backend="reference"), "logp of z")


@pytest.mark.parametrize("temperature", [1.0, 1.3])
def test_corners(temperature: float) -> None:
    logits = corners()
    targets = torch.arange(len(logits)).cuda() % 700
    state = lse_state(logits, temperature)
    assert_same(state, lse_state(logits, temperature, backend="reference"), "state")
    assert_same(finish(state), finish(state, backend="reference"), "log-sum-exp")
    assert_same(
        logprob(logits, targets, temperature), logprob(logits, targets, temperature, backend="reference"), "logp"
    )


def results(backend: str, kind: str, rows: int, temperature: float, bias: bool) -> list[Tensor]:
    g = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 96, generator=g).bfloat16().cuda().requires_grad_()
    weight = (0.3 * torch.randn(700, 96, generator=g)).bfloat16().cuda().requires_grad_()
    offset = torch.randn(700, generator=g).bfloat16().cuda().requires_grad_() if bias else None
    targets = torch.randint(-1, 650, (rows,), generator=g).cuda()
    leaves = [weight] if offset is None else [weight, offset]
    for leaf in leaves:
        leaf.main_grad = torch.randn(leaf.shape, generator=g).cuda()
    warmth = torch.linspace(0.5, 1.5, rows).cuda() if temperature == 0 else temperature
    logp = linear_logp(hidden, weight, targets, warmth, offset, real_vocab=650, backend=backend, arithmetic=kind)
    logp.backward(torch.randn(rows, generator=g).cuda())
    return [logp.detach(), hidden.grad, *(leaf.main_grad for leaf in leaves)]


@pytest.mark.parametrize("kind", ["sm90", "fma32"])
@pytest.mark.parametrize(("rows", "temperature", "bias"), [(300, 1.0, False), (257, 0.7, True), (40, 0, False)])
def test_fused(rows: int, temperature: float, bias: bool, kind: str, monkeypatch) -> None:
    own = device_arithmetic(torch.device("cuda", 0))
    if kind not in ("fma32", own):
        pytest.skip(f"this device computes in {own}, not in {kind}")
    want = results("reference", kind, rows, temperature, bias)
    for tokens, columns in ((8192, 8448), (128, 256), (64, 16)):
        # blocks and chunks are cut at multiples of 16
        monkeypatch.setattr(BACKENDS["triton"], "TOKENS", tokens)
        monkeypatch.setattr(BACKENDS["triton"], "COLUMNS", columns)
        got = results("triton", kind, rows, temperature, bias)
        for name, a, b in zip(("logp", "dhidden", "dweight", "dbias"), got, want, strict=False):
            assert_same(a, b, f"{name}, blocks of {tokens} tokens, chunks of {columns} columns")


def test_fused_is_like_logits() -> None:
    from samebits.ops.linear import matmul_f32

    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(512, 1024, generator=g).bfloat16().cuda()
    weight = (0.1 * torch.randn(20_000, 1024, generator=g)).bfloat16().cuda()
    targets = torch.randint(0, 20_000, (512,), generator=g).cuda()
    whole = linear_logp(hidden, weight, targets, 0.9)
    assert_same(whole, logprob(matmul_f32(hidden, weight), targets, 0.9))
    for rows in (1, 5, 64, 100):
        assert_same(linear_logp(hidden[:rows], weight, targets[:rows], 0.9), whole[:rows], f"{rows} rows")


def test_a_seeded_fault_is_seen() -> None:
    logits = logits_of(300, 700)
    state = lse_state(logits)
    assert first_difference(lse_state(logits[:, :-1]), state) is not None
    nudged = logits.clone()
    nudged[17, 3] *= 1 + 2.0**-20
    assert first_difference(lse_state(nudged), state) is not None
