"""What a rollout engine must know before it starts. Standard library only, so that a driver can build it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from samebits.contract.routes import ModuleRoutes
from samebits.timeline.types import WeightVersion

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One rollout engine.

    `model` is a directory in Hugging Face form. `max_tp` is the largest tensor parallelism of either side of
    the run, `contract` the run contract as data (`RunContract.as_data()`; empty on an all-native engine),
    `start_version` the name of the weights in `model`. `threads` counts CPU threads per worker; 0 shares the
    CPUs of this process among the workers. `compiled` is vLLM's own compiled mode, for all-native engines only:
    faster per token, but tens of seconds slower to start. `forced` engines produce the tokens that a request names
    instead of drawing (requests that name none are drawn as ever). `proof_dir`, when given, receives one route record
    per worker. On `device` cuda, `graphs` captures batches, whole or in pieces between attention calls, of the token
    counts in `capture_sizes` (vLLM's own choice where it is empty) unless all is native, and `threads` means nothing;
    `cards` are those that this engine sees, in its order, the ones that its workers compute on first (all as they come
    where it is empty): it must see a card whose weights it reads. With `random_weights` nothing is read from `model`
    but its configuration, and no digests are taken: for measurements of speed.
    """

    model: str
    case: ModuleRoutes = field(default_factory=ModuleRoutes)
    tp: int = 1
    max_tp: int = 1
    contract: Mapping[str, Any] = field(default_factory=dict)
    engine: int = 0
    start_version: WeightVersion = WeightVersion(0, "")  # noqa: RUF009 (frozen)
    seed: int = 0
    max_model_len: int = 1024
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    block_size: int = 32
    kv_cache_gib: float = 0.25
    prefix_caching: bool = True
    compiled: bool = False
    forced: bool = False
    device: Device = "cpu"
    cards: tuple[int, ...] = ()
    graphs: bool = True
    capture_sizes: tuple[int, ...] = ()
    random_weights: bool = False
    threads: int = 0
    proof_dir: str = ""

    def __post_init__(self) -> None:
        for name in ("tp", "max_tp"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two (1, 2, 4, ...), got {size}")
        if self.tp > self.max_tp:
            raise ValueError(f"tp = {self.tp} is larger than max_tp = {self.max_tp}; raise max_tp to {self.tp}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 31:
            raise ValueError(f"seed must be in [0, 2^31), as vLLM wants it, got {self.seed}")
        if not self.kv_cache_gib > 0:
            raise ValueError(f"kv_cache_gib must be positive, got {self.kv_cache_gib}")
        if self.threads < 0:
            raise ValueError(f"threads must not be negative, got {self.threads}")
        if self.compiled and not self.case.all_native:
            raise ValueError("compiled: samebits runs eagerly; set all three cases to P or compiled to False")
        if not self.case.all_native and not self.contract:
            raise ValueError("contract: an engine with an R module needs the run contract as data")
