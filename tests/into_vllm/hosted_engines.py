"""Engines of the tests: each in a process of its own, since a process serves one route plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from watched import WatchedEngine

from samebits.contract import run_contract
from samebits.into_vllm.config import EngineConfig
from samebits.rl.processes import Host

SEGMENTS = 2


class Engine:
    """A hosted engine: methods by name, results waited for."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __call__(self, method: str, *args: Any) -> Any:
        return self._host.call(method, *args).result(timeout=300)


def engine_config(model: Path, **changes: Any) -> EngineConfig:
    from samebits.contract.boundaries import BOUNDARIES

    settings: dict[str, Any] = {
        "max_tp": SEGMENTS,
        "contract": run_contract(BOUNDARIES, segments=SEGMENTS).as_data(),
        "max_model_len": 128,
        "max_num_seqs": 16,
        "kv_cache_gib": 1 / 64,
        **changes,
    }
    return EngineConfig(model=str(model), **settings)


def cramped(model: Path) -> EngineConfig:
    """So little room that prompts come in chunks and requests are preempted; small pages."""
    return engine_config(
        model,
        prefix_caching=False,
        max_num_batched_tokens=24,
        max_num_seqs=12,
        block_size=16,
        kv_cache_gib=36 * 2 * 2 * 16 * 2 * 64 * 2 / 2**30,
    )


@contextmanager
def hosted(home: Path, name: str, config: EngineConfig, kind: type[WatchedEngine] = WatchedEngine) -> Iterator[Engine]:
    """A started engine. Raises what starting it raised."""
    host = Host(name, home / f"{name}.log")
    try:
        host.start(kind, config).result(timeout=300)
        yield Engine(host)
        host.call("close").result(timeout=60)
    finally:
        host.kill()
