"""What the route records must show before a zero means something: who ran, by which route, and that it ran.

A record: {"role": "trainer" | "rollout", "engine" (rollout only), "rank", "contract", "contract_content",
"modules": {name: {"group", "route", "calls", ...}}, "counters": {kernel: calls}, ...}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from samebits.contract import digest_of

POSITION = {"trainer": 0, "rollout": 1}


def process_name(record: Mapping[str, Any]) -> str:
    """trainer-0, or rollout-0-1 for worker 1 of engine 0. Raises ValueError when the record does not say."""
    role, engine, rank = record.get("role"), record.get("engine"), record.get("rank")
    if role not in POSITION or type(rank) is not int or (role == "rollout" and type(engine) is not int):
        raise ValueError(f"a route record names no process: role {role!r}, engine {engine!r}, rank {rank!r}")
    return f"trainer-{rank}" if role == "trainer" else f"rollout-{engine}-{rank}"


def routes_of(cases: Mapping[str, str], role: str) -> dict[str, str]:
    """R or P of each module group on one side of the cases."""
    return {group: case.split("/")[POSITION[role]] for group, case in cases.items()}


def is_strict(record: Mapping[str, Any]) -> bool:
    """Whether this process serves any module by the samebits route."""
    return any(module.get("route") == "R" for module in record["modules"].values())


def check_routes(
    records: Iterable[Mapping[str, Any]],
    cases: Mapping[str, str],
    contract: str,
    ranks: int,
    engines: int,
    workers: int,
) -> list[str]:
    """The first fault of the route records against the declared case, or an empty list.

    Wanted are one record of each of `ranks` trainer ranks and of each of `workers` workers of `engines` engines.
    """
    wanted = [f"trainer-{rank}" for rank in range(ranks)]
    wanted += [f"rollout-{engine}-{rank}" for engine in range(engines) for rank in range(workers)]
    seen: set[str] = set()
    trained: set[Any] = set()
    for record in records:
        try:
            name = process_name(record)
        except ValueError as error:
            return [str(error)]
        if name in seen or name not in wanted:
            return [f"route record of {name}: there is another one, or no such process in this run"]
        seen.add(name)
        problem = _check_record(record, routes_of(cases, record["role"]), contract)
        if problem:
            return [f"route record of {name}: {problem}"]
        if record["role"] == "trainer":
            trained |= {module.get("group") for module in record["modules"].values() if module.get("calls")}
    missing = [name for name in wanted if name not in seen]
    if missing:
        return [f"no route record of {missing[0]}"]
    untrained = sorted(set(cases) - trained)
    return [f"no trainer rank called any module of {', '.join(untrained)}"] if untrained else []


def _is_stage(record: Mapping[str, Any]) -> bool:
    """Whether this is one of several pipeline stages of a trainer, of which each holds a part of the modules."""
    parallel = record.get("parallel")
    stages = parallel.get("pp") if isinstance(parallel, Mapping) else None
    return record["role"] == "trainer" and type(stages) is int and stages > 1


def _check_record(record: Mapping[str, Any], routes: Mapping[str, str], contract: str) -> str | None:
    modules = record.get("modules")
    if not isinstance(modules, Mapping) or not all(isinstance(m, Mapping) for m in modules.values()):
        return "no modules"
    called: set[str] = set()
    held: set[str] = set() if _is_stage(record) else set(routes)
    for name, module in modules.items():
        group, calls = module.get("group"), module.get("calls")
        if group not in routes:
            continue
        held.add(group)
        if module.get("route") != routes[group]:
            return f"{name} went route {module.get('route')}, declared for {group} is {routes[group]}"
        if type(calls) is int and calls > 0:
            called.add(group)
    silent = sorted(held - called)
    if silent:
        return f"no call of any module of {', '.join(silent)}"
    if "R" not in routes.values():
        return None
    if record.get("contract") != contract:
        return f"served contract {str(record.get('contract'))[:12]}, the run's is {contract[:12]}"
    if "contract_content" in record and digest_of(record["contract_content"]) != contract:
        return f"the contract's content that it states has not the digest {contract[:12]} of the run's"
    counters = record.get("counters")
    if not isinstance(counters, Mapping) or not any(type(c) is int and c > 0 for c in counters.values()):
        return "no kernel counted a call, so nothing shows that the samebits route ran"
    return None
