"""Timing on a GPU: both sides in captured graphs that take turns, and where a record comes from."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import torch

PACKAGES = ("torch", "triton", "nvidia-cublas", "liger-kernel", "vllm", "megatron-core")


def origin(commit: str) -> dict[str, object]:
    """Card, driver, versions and commit of a measurement (a copied tree has no git: then the commit is given)."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    cards = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    name, driver, clock, power = cards[0].split(", ")
    return {
        "card": name, "driver": driver, "max_sm_clock": clock, "power_limit": power.strip(),
        "cuda": torch.version.cuda, "versions": {name: _version(name) for name in PACKAGES}, "commit": commit,
    }  # fmt: skip


def in_turn(functions: Mapping[str, Callable[[int], object]], *, calls: int, repeats: int) -> dict[str, float]:
    """Median seconds of one call of each: graphs of `calls` calls (numbered, so that inputs can rotate), in turn."""
    graphs = {name: _captured(function, calls) for name, function in functions.items()}
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            taken[name].append(_seconds(graph.replay) / calls)
    return {name: median(times) for name, times in taken.items()}


def eager_in_turn(functions: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median seconds of each, launched one by one, in turn; the first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(repeats + 1):
        for name, function in functions.items():
            seconds = _seconds(function)
            if round_number:
                taken[name].append(seconds)
    return {name: median(times) for name, times in taken.items()}


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that a call holds above what was held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _captured(function: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    function(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            function(call)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _seconds(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
