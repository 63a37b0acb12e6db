"""A rollout engine that can also say how often vLLM preempted a request. Imported by name in its own process."""

from __future__ import annotations

import os
from typing import Any

from samebits.into_vllm import pieces
from samebits.into_vllm.config import EngineConfig
from samebits.into_vllm.engine import RolloutEngine
from samebits.timeline.types import GenerateRequest


class WatchedEngine(RolloutEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        scheduler = self._engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request
        self._preempted = 0
        self._count = 0
        self._penalty = 0.0
        self._seen: list[tuple[list, list, list]] = []
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

    def likeliest(self, requests: list[GenerateRequest], count: int) -> list[tuple[list, list, list]]:
        """Per request (ids, log-probabilities, ranks), each token's own first, then the `count` likeliest ones."""
        self._count, self._seen = count, []
        try:
            self.generate(requests)
        finally:
            self._count = 0
        return self._seen

    def _params(self, number: int, request: GenerateRequest) -> Any:
        params = super()._params(number, request)
        params.logprobs = self._count
        params.presence_penalty = self._penalty
        return params

    def penalised(self, requests: list[GenerateRequest], penalty: float) -> list:
        """Like generate, with a presence penalty."""
        self._penalty = penalty
        try:
            return self.generate(requests)
        finally:
            self._penalty = 0.0

    def _rollout(self, request: GenerateRequest, output: Any, *rest: Any) -> Any:
        if not self._count:
            return super()._rollout(request, output, *rest)
        flat = output.logprobs
        parts = [slice(*ends) for ends in zip(flat.start_indices, flat.end_indices, strict=True)]
        self._seen.append(
            tuple([column[part] for part in parts] for column in (flat.token_ids, flat.logprobs, flat.ranks))
        )
        return None

    def kernels(self) -> str:
        """What the straight decoder calls its kernels through."""
        return str(self._engine.collective_rpc(lambda worker: repr(worker.model_runner.model.samebits.decoder.kernels)))

    def sockets(self) -> str:
        """The folder of the sockets of vLLM's processes."""
        return os.environ["VLLM_RPC_BASE_PATH"]

    def worker_pids(self) -> dict[int, int]:
        """Rank -> process id."""
        return self._pids


class WholeGraphEngine(WatchedEngine):
    """As with a vLLM that can't capture pieces without its compiler: every batch that is captured is one graph."""

    def __init__(self, config: EngineConfig) -> None:
        pieces.are_there = lambda: False
        super().__init__(config)
