"""Launches that skip Triton's own look-up do what Triton's launches do, whatever the kinds of their arguments.

python -m pytest tests/gpu/test_gpu_launcher.py
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)

import triton
import triton.language as tl
from triton import knobs

from samebits.backends.launcher import Launcher, bind, launcher


@triton.jit
def shifted(x, y, other, n, by, scale, BLOCK: tl.constexpr, ADD: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0) * scale + by
    if ADD:
        value += tl.load(other + at, mask=at < n, other=0.0)
    tl.store(y + at, value, mask=at < n)


def run(kernel, x: torch.Tensor, other: torch.Tensor | None, by: int, block: int = 64) -> torch.Tensor:
    y = torch.full_like(x, -1.0)
    kernel[(triton.cdiv(x.numel(), block),)](
        x, y, other, x.numel(), by, 2.0, BLOCK=block, ADD=other is not None, num_warps=2
    )
    return y


def test_arguments_of_all_kinds() -> None:
    quick = launcher(shifted)
    assert isinstance(quick, Launcher)
    base = torch.randn(4096, device="cuda")
    for _ in range(2):  # compiled at first, known then
        for start, count in ((0, 1), (0, 16), (0, 17), (1, 16), (3, 4000), (4, 256)):  # addresses of several alignments
            x = base[start : start + count]
            for by in (1, 2, 16, 2**40, -(2**40), 2**63):
                for other in (None, x):
                    expected = x * 2.0 + float(by) + (0 if other is None else x)
                    assert torch.equal(run(quick, x, other, by), expected), (start, count, by)
            assert torch.equal(run(quick, x.double(), None, 3), x.double() * 2.0 + 3.0)
            assert torch.equal(run(quick, x, None, 3, block=128), x * 2.0 + 3.0)


@triton.jit
def scaled(x, y, n, scales, which, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(y + at, value * tl.load(scales + tl.load(which)), mask=at < n)


def test_held_arguments() -> None:
    scales, which = torch.tensor([2.0, 3.0], device="cuda"), torch.tensor([1], pin_memory=True)
    launch = bind(scaled, scales, which, BLOCK=64, num_warps=2)
    base = torch.randn(4096, device="cuda")
    for turn in range(4):  # compiled at first, known then; what is held may change its values
        which[0] = turn % 2
        for start, count in ((0, 1), (0, 16), (1, 16), (3, 4000)):
            x = base[start : start + count]
            y = torch.zeros_like(x)
            launch((triton.cdiv(count, 64),), x, y, count)
            torch.cuda.synchronize()
            assert torch.equal(y, x * (2.0 + turn % 2)), (turn, start, count)
    with pytest.raises(ValueError, match="takes 5 arguments by position, got 4"):
        launch((1,), base, 1)


def test_a_stream_and_a_graph() -> None:
    x = torch.randn(256, device="cuda")
    quick, graph = launcher(shifted), torch.cuda.CUDAGraph()
    run(quick, x, None, 5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x += 1.0
        y = run(quick, x, None, 5)  # on another stream it would read x as it was
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2.0 + 5.0)
    with torch.cuda.graph(graph):
        captured = run(quick, x, None, 7)
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, x * 2.0 + 7.0)


def test_one_who_watches_launches_sees_them() -> None:
    x, seen = torch.randn(256, device="cuda"), []
    quick = launcher(shifted)
    run(quick, x, None, 5)

    def watch(metadata) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(watch)
    try:
        run(quick, x, None, 5)
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)
    run(quick, x, None, 5)
    assert seen == ["shifted"]


def test_too_few_arguments() -> None:
    with pytest.raises(ValueError, match="takes ADD by name, too"):
        launcher(shifted)[(1,)](None, None, None, 1, 1, 2.0, BLOCK=64)
    with pytest.raises(ValueError, match="takes 6 arguments by position, got 5"):
        launcher(shifted)[(1,)](None, None, None, 1, 1, scale=2.0, BLOCK=64, ADD=False)
