"""The route plan: what every vLLM process must replace, and under which contract. Standard library only.

It travels as JSON in one environment variable, which every process that vLLM starts inherits before any
plugin runs; the engine configuration carries its digest as a second path, so a stale plan can't go unnoticed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from samebits.contract import canonical_json, digest_of
from samebits.contract.routes import MODULES, ModuleRoutes, Route
from samebits.into_vllm.config import Device, EngineConfig
from samebits.timeline.types import WeightVersion

PLAN_VARIABLE = "SAMEBITS_VLLM_PLAN"


@dataclass(frozen=True, kw_only=True)
class RoutePlan:
    """One engine's routes: R or P per module group, the run contract, the K segments of row-parallel weights."""

    case: ModuleRoutes
    contract: dict[str, Any]
    segments: int
    engine: int
    threads: int
    compiled: bool
    device: Device
    graphs: bool
    random_weights: bool
    start_version: WeightVersion
    proof_dir: str

    @classmethod
    def for_engine(cls, config: EngineConfig, threads: int) -> RoutePlan:
        """The plan of one engine with so many CPU threads per worker."""
        return cls(
            case=config.case,
            contract=dict(config.contract),
            segments=config.max_tp,
            engine=config.engine,
            threads=threads,
            compiled=config.compiled,
            device=config.device,
            # of native code vLLM captures what it compiled, and calls that were compiled can't be counted
            graphs=config.device == "cuda" and config.graphs and not config.case.all_native,
            random_weights=config.random_weights,
            start_version=config.start_version,
            proof_dir=config.proof_dir,
        )

    @classmethod
    def from_json(cls, text: str) -> RoutePlan:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        data = json.loads(text)
        if not isinstance(data, dict) or set(data) != set(cls.__dataclass_fields__):
            wanted = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"a route plan has exactly the keys {wanted}; got {text[:200]}")
        data["case"] = ModuleRoutes(**data["case"])
        data["start_version"] = WeightVersion(**data["start_version"])
        return cls(**data)

    def to_json(self) -> str:
        return canonical_json(asdict(self))

    def digest(self) -> str:
        """The name of this plan, by content."""
        return digest_of(asdict(self))

    @property
    def mode(self) -> str:
        """How the worker runs the model: eager, compiled (vLLM's compiler) or captured (graphs, replayed)."""
        return "compiled" if self.compiled else "captured" if self.graphs else "eager"

    @property
    def contract_digest(self) -> str:
        """The digest of the run contract; empty when there is none (an all-native engine)."""
        return digest_of(self.contract) if self.contract else ""

    def route(self, group: str) -> Route:
        """R or P of one module group."""
        if group not in MODULES:
            raise ValueError(f"no module group {group!r}; there are {', '.join(MODULES)}")
        return self.case.groups()[group]
