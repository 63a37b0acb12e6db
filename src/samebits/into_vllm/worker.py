"""What the engine asks of every worker, through vLLM's worker extension and collective_rpc."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samebits.into_vllm.forced import force_native
from samebits.into_vllm.layers import check_workers
from samebits.into_vllm.loader import WorkerState
from samebits.into_vllm.proof import route_record
from samebits.into_vllm.sampling import KeyedSampler, holds_keys
from samebits.timeline.types import WeightVersion
from samebits.trace import Entry, Point


class SamebitsWorker:
    """Mixed into vLLM's worker class. Answers are plain data, since they cross processes."""

    rank: int
    model_runner: Any
    samebits_tracing: Any = None

    def samebits_proof(self) -> dict[str, Any] | None:
        """The route record of this process, or None when samebits did not load here."""
        state = self._samebits_state()
        if state is None:
            return None
        runner = self.model_runner
        keyed = holds_keys(runner.input_batch.logitsprocs)
        record = route_record(state, self.rank, runner.sampler, keyed, runner.model_config.model)
        if state.plan.proof_dir:
            path = Path(state.plan.proof_dir) / f"rollout-{state.plan.engine}-rank-{self.rank}.json"
            path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return record

    def samebits_publish(self, path: str, counter: int, digest: str) -> list[dict[str, Any]]:
        """Load the weights in `path` in place under a new version; the digests of what this worker then holds."""
        shards = self._require_state().weights.publish(path, WeightVersion(counter, digest))
        return [asdict(shard) for shard in shards]

    def samebits_shards(self) -> list[dict[str, Any]]:
        """The digests of the weights that this worker holds."""
        return [asdict(shard) for shard in self._require_state().weights.shards]

    def samebits_version(self) -> tuple[int, str] | None:
        """(counter, digest) of the weights that this worker holds; None after a publication that failed."""
        version = self._require_state().weights.version
        check_workers()  # asked after tokens were produced: were their sums over workers whole?
        return None if version is None else (version.counter, version.digest)

    def samebits_supports(self) -> dict[int, dict[int, bytes]]:
        """What was kept for tokens drawn under limits since the last call: request -> position -> ids (int32)."""
        taken: dict[int, dict[int, bytes]] = self.model_runner.sampler.take_supports()
        return taken

    def samebits_process(self) -> tuple[int, int]:
        """(rank, process id)."""
        return self.rank, os.getpid()

    def samebits_trace(self, traced: Mapping[int, int], keep: Collection[tuple[int, str]]) -> None:
        """Begin to record: `traced` maps the number of a request to its last index of interest."""
        from samebits.into_vllm.tracing import WorkerTrace

        if self.samebits_tracing is not None:  # nobody asked for it
            self.samebits_tracing.close()
        points = [Point(*point) for point in keep]
        self.samebits_tracing = WorkerTrace(self.model_runner, self._require_state(), traced, points)

    def samebits_traced(self) -> tuple[list[Entry], dict[str, Any]]:
        """Stop recording: what was recorded, and the facts of every site."""
        tracing, self.samebits_tracing = self.samebits_tracing, None
        tracing.close()
        return tracing.take(), tracing.facts()

    def samebits_live_shards(self) -> list[dict[str, Any]]:
        """The digests of the weights that this worker holds now, computed anew."""
        return [asdict(shard) for shard in self._require_state().weights.live()]

    def samebits_weight(self, name: str) -> list[tuple[int, int, Any]]:
        """(dim, first row, bf16 bits as int16) of each slice of a Hugging Face parameter that this worker holds."""
        return self._require_state().weights.slices(name)

    def samebits_force(self) -> None:
        """From now on produce the tokens that requests name; the keyed sampler of the samebits route does so itself."""
        sampler = self.model_runner.sampler
        if not isinstance(sampler, KeyedSampler):
            force_native(sampler)

    def _samebits_state(self) -> WorkerState | None:
        return getattr(self.model_runner.model, "samebits", None)

    def _require_state(self) -> WorkerState:
        state = self._samebits_state()
        if state is None:
            raise RuntimeError(f"worker {self.rank}: samebits is not loaded in this process")
        return state
