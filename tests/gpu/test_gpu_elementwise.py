"""RMSNorm, rotary, SwiGLU and embedding on a card against their definitions: no dot products, so one set of bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samebits.bits import assert_same, first_difference
from samebits.ops.embedding import BACKENDS as EMBEDDING
from samebits.ops.rms_norm import BACKENDS as NORM
from samebits.ops.rms_norm.launch import Launch
from samebits.ops.rotary import BACKENDS as ROTARY
from samebits.ops.rotary import rotary_table
from samebits.ops.swiglu import BACKENDS as SWIGLU

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run `python -m pytest tests/gpu` on a machine with one"
)

KINDS = ("normal", "large", "tiny", "every bit pattern")


def values(*shape: int, kind: str = "normal", seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if kind == "every bit pattern":  # NaN and infinities, too
        return torch.randint(-(2**15), 2**15, shape, generator=g).to(torch.int16).view(torch.bfloat16).cuda()
    x = torch.randn(*shape, generator=g)
    return (x * {"normal": 1.0, "large": 2.0**60, "tiny": 2.0**-120}[kind]).bfloat16().cuda()


def canonical(x: Tensor) -> Tensor:
    """fp32 statistics with one NaN: a card and a CPU write other bits."""
    return torch.where(x.isnan(), torch.nan, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 127, 128, 1000, 1025, 4096, 5120])
def test_norm(width: int, kind: str) -> None:
    rows = 300
    x, residual = values(rows, width, kind=kind), values(rows, width, kind=kind, seed=1)
    weight = (1 + 0.3 * values(width, seed=2).float()).bfloat16()
    for other in (None, residual):
        got, want = (NORM[name].forward(x, other, weight, 1e-6) for name in ("triton", "reference"))
        assert_same(got[0], want[0], f"y {kind}")
        assert_same(got[1], want[1], f"sum {kind}")
        assert_same(canonical(got[2]), canonical(want[2]), f"scale {kind}")
    if kind == "every bit pattern":
        return
    dy, dsum = values(rows, width, kind=kind, seed=3), values(rows, width, kind=kind, seed=4)
    scale = NORM["reference"].forward(x, None, weight, 1e-6)[2]
    for other in (None, dsum):
        sums = [torch.randn(width, generator=torch.Generator().manual_seed(5)).cuda() for _ in range(2)]
        got, want = (
            NORM[name].backward(dy, x, weight, scale, other, dw)
            for name, dw in zip(("triton", "reference"), sums, strict=True)
        )
        assert_same(got, want, f"dx {kind}")
        assert_same(canonical(sums[0]), canonical(sums[1]), f"dw {kind}")


NORMS = [Launch(1, 1), Launch(1, 2), Launch(1, 4), Launch(2, 4), Launch(8, 4), Launch(1, 4, True), Launch(1, 16, True)]


@pytest.mark.parametrize("how", NORMS, ids=str)
def test_every_launch_of_norm(how: Launch) -> None:
    x, weight = values(300, 1024), values(1024, seed=2)
    got, want = NORM["triton"].forward(x, x, weight, 1e-6, how), NORM["reference"].forward(x, x, weight, 1e-6)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("heads", [1, 5, 8, 32])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotary(heads: int, inverse: bool) -> None:
    cos, sin = (t.cuda() for t in rotary_table(128, 1e6, 5000))
    x = values(2000, heads + 2, 128)[:, 1:-1]
    positions = torch.randint(0, 5000, (2000,), generator=torch.Generator().manual_seed(1)).cuda()
    got, want = (ROTARY[name].rotate(x, positions, cos, sin, inverse=inverse) for name in ("triton", "reference"))
    assert_same(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_swiglu(kind: str) -> None:
    gate_up = 4 * values(1000, 2 * 1300, kind=kind)
    assert_same(SWIGLU["triton"].forward(gate_up), SWIGLU["reference"].forward(gate_up))
    dy = values(1000, 1300, seed=1)
    assert_same(SWIGLU["triton"].backward(dy, gate_up), SWIGLU["reference"].backward(dy, gate_up))


def test_embedding() -> None:
    ids = torch.randint(0, 60, (4000,), generator=torch.Generator().manual_seed(2)).cuda()
    table, dy = values(40, 1032), values(4000, 1032, seed=1)
    assert_same(EMBEDDING["triton"].forward(ids, table, 10), EMBEDDING["reference"].forward(ids, table, 10))
    sums = [torch.randn(40, 1032, generator=torch.Generator().manual_seed(5)).cuda() for _ in range(2)]
    for name, dw in zip(("triton", "reference"), sums, strict=True):
        EMBEDDING[name].backward(ids, dy, 10, dw)
    assert_same(*sums)


def test_a_seeded_fault_is_seen() -> None:
    x, weight = values(256, 4096), values(4096, seed=2)
    want = NORM["reference"].forward(x, None, weight, 1e-6)
    other = torch.randperm(4096, generator=torch.Generator().manual_seed(1)).cuda()
    got = NORM["triton"].forward(x[:, other].contiguous(), None, weight, 1e-6)  # the same squares in other lanes
    assert first_difference(got[2], want[2]) is not None
