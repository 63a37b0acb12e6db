"""Route records: what really computes in one worker, and whether that is what the plan wants."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.backends import device_arithmetic
from samebits.backends.identity import kernels
from samebits.contract import digest_of, held_contract, model_constants, refusal
from samebits.contract.boundaries import BOUNDARIES
from samebits.into_vllm.calls import Calls
from samebits.into_vllm.patches import DISTRIBUTION, patches_of
from samebits.into_vllm.places import SAMPLER, Place
from samebits.into_vllm.plan import RoutePlan

if TYPE_CHECKING:
    from samebits.into_vllm.loader import WorkerState
    from samebits.into_vllm.routing import RoutedModule


class ProofMissing(RuntimeError):
    """A worker can't prove that it runs the routes that it should. The message names the worker and the gap."""


def route_record(state: WorkerState, rank: int, sampler: Any, keyed: bool, model: str) -> dict[str, Any]:
    """Everything that one worker can say about its routes, as plain data. `model` is the directory it was built from.

    `calls` counts what a routed layer computed, `captured` its calls that a graph captured; of a native layer `calls`
    only says whether it was ever called, so that counting costs the native side nothing. `counters` are advanced by
    the kernels themselves. `keyed`: the keys of draws are kept.
    """
    plan, version_held = state.plan, state.weights.version
    held = _held_contract(plan, model)
    return {
        "process": os.getpid(),
        "role": "rollout",
        "engine": plan.engine,
        "rank": rank,
        "mode": plan.mode,
        "keyed": keyed,
        "plan": plan.digest(),
        "contract": digest_of(held) if held else "",
        "contract_content": held,
        "segments": plan.segments,
        "graphs": graph_identities() if plan.compiled else [],
        "straight": state.decoder is not None,
        "modules": {
            **{one.name: _routed_record(one) for one in state.modules},
            SAMPLER.pattern: _module_record(
                SAMPLER, plan.route(SAMPLER.group), class_name(sampler), getattr(sampler, "calls", Calls()).computed
            ),
        },
        "patches": [patch.record() for patch in patches_of(plan)],
        "versions": {name: version(name) for name in (DISTRIBUTION, "torch", "samebits")},
        **_kernels(plan),
        "weights": None if version_held is None else [version_held.counter, version_held.digest],
    }


def graph_identities() -> list[dict[str, Any]]:
    """The compiled graphs of this process without their modules, which carry their own nodes."""
    from samebits.into_vllm.compiled import graphs

    return [{name: graph[name] for name in ("digest", "nodes", "samebits")} for graph in graphs()]


def _kernels(plan: RoutePlan) -> dict[str, Any]:
    """The kernels of this process and their counters; on a GPU also which products of the vendor may replace them."""
    import torch

    if plan.device == "cpu":
        return kernels(torch.device("cpu"))
    from samebits.ops.linear import vendor

    device = torch.device("cuda", torch.cuda.current_device())
    return {
        "device": str(device),
        **kernels(device),
        "certificates": [certificate.as_data() for certificate in vendor.certificates()],
        "certified_products": vendor.served(),
    }


def _held_contract(plan: RoutePlan, model: str) -> dict[str, Any]:
    """The run contract that this process computes by; empty on an engine that serves none."""
    if not plan.contract:
        return {}
    shape = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return held_contract(
        plan.contract,
        BOUNDARIES,
        segments=plan.segments,
        model=model_constants(shape),
        arithmetic=arithmetic_of(plan),
    )


def arithmetic_of(plan: RoutePlan) -> str:
    """How the dot products of this process accumulate."""
    if plan.device == "cpu":
        return "fma32"
    import torch

    return device_arithmetic(torch.device("cuda", torch.cuda.current_device()))


def _routed_record(one: RoutedModule) -> dict[str, Any]:
    record = _module_record(one.place, one.route, one.implementation, one.calls)
    record |= {"captured": one.captured} if one.captured else {}
    return record if one.nodes is None else {**record, "nodes": one.nodes}


def _module_record(place: Place, route: str, implementation: str, calls: int) -> dict[str, Any]:
    return {
        "group": place.group,
        "boundary": place.boundary,
        "route": route,
        "implementation": implementation,
        "calls": calls,
    }


def class_name(thing: object) -> str:
    """The class of an object, with its module."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def check_proofs(records: Sequence[dict[str, Any] | None], plan: RoutePlan, tp: int) -> None:
    """Raises ProofMissing unless `records` holds one good record of each of the `tp` workers."""
    if len(records) != tp:
        raise ProofMissing(f"{tp} workers were started, {len(records)} answered")
    for place, record in enumerate(records):
        if record is None:
            raise ProofMissing(f"worker {place} of {tp}: the samebits plugin did not load there")
        _check_record(record, plan)
    known = [record for record in records if record is not None]
    if {record["rank"] for record in known} != set(range(tp)):
        raise ProofMissing(f"want ranks 0 to {tp - 1}, got {sorted(record['rank'] for record in known)}")
    for field in ("kernels", "versions"):
        if any(record[field] != known[0][field] for record in known):
            raise ProofMissing(f"workers differ in {field}: {[record[field] for record in known]}")


def _check_record(record: dict[str, Any], plan: RoutePlan) -> None:
    who = f"worker {record['rank']} (process {record['process']})"
    if record["contract"] != plan.contract_digest:
        raise ProofMissing(refusal(who, plan.contract, record["contract_content"]))
    if record["plan"] != plan.digest():
        raise ProofMissing(f"{who}: plan is {record['plan']!r:.20}, want {plan.digest()!r:.20}")
    if plan.route(SAMPLER.group) == "R" and not record["keyed"]:
        raise ProofMissing(f"{who}: the logits processor that keeps the keys of draws is not loaded")
    for name, module in record["modules"].items():
        route = plan.route(module["group"])
        ours = module["implementation"].startswith("samebits.")
        if module["route"] != route or ours != (route == "R"):
            raise ProofMissing(f"{who}: {name} is computed by {module['implementation']}, the plan wants route {route}")
    for patch in patches_of(plan):
        placed = [p for p in record["patches"] if p["symbol"] == patch.symbol.path and p["in_place"]]
        if not placed:
            raise ProofMissing(f"{who}: the patch of {patch.symbol.path} is not in place")
