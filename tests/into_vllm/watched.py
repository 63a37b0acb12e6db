"""A rollout engine that can also say how often vLLM preempted a request. Imported by name in its own process."""

from __future__ import annotations

from typing import Any

from samebits.into_vllm.config import EngineConfig
from samebits.into_vllm.engine import RolloutEngine


class WatchedEngine(RolloutEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        scheduler = self._engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request
        self._preempted = 0
        self._hits = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._preempted += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted
        lookup = scheduler.kv_cache_manager.get_computed_blocks

        def looked_up(*args: Any, **kwargs: Any) -> Any:
            found = lookup(*args, **kwargs)
            self._hits += found[1] > 0
            return found

        scheduler.kv_cache_manager.get_computed_blocks = looked_up

    def preempted(self) -> int:
        """How often a request was preempted since the start."""
        return self._preempted

    def prefix_hits(self) -> int:
        """How many requests found cached keys and values since the start."""
        return self._hits

    def worker_pids(self) -> dict[int, int]:
        """Rank -> process id."""
        return self._pids
