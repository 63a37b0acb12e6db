"""What the route records must show before a zero means something: who ran, by which route, and that it ran.

A record: {"role": "trainer" | "rollout", "engine" (rollout only), "rank", "mode": "eager" | "captured" | "compiled",
"contract", "contract_content", "modules": {name: {"group", "boundary", "route", "implementation", "calls", ...}},
"counters": {kernel: calls}, "kernels": sha256 of their binary, ...}. A module that a graph captured also has
"captured": such calls are apart from `calls`, since they launch nothing. A module of a compiled part has "nodes",
{operator: how many nodes of the compiled graphs are this module's}, and the record has "graphs". Where certified
products of the vendor computed for the linear boundary the record has their number, "certified_products".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from samebits.contract import digest_of

POSITION = {"trainer": 0, "rollout": 1}
OURS = "samebits."
# More than any run has, and few enough to be looked for one by one.
MAX_PROCESSES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Which kernels show that a boundary was computed by samebits. A counter may say more after a dot: linear.sm90.
WITNESSES = {
    "embedding": ("embedding",),
    "rms_norm": ("rms_norm",),
    "linear": ("linear", "linear_logp", "kept_linear_logp"),
    "rotary": ("rotary",),
    "attention": ("attention", "paged_attention"),
    "swiglu": ("swiglu",),
    "logprob": ("linear_logp", "logprob", "sample", "kept_linear_logp", "sample_kept"),
}


def process_name(record: Mapping[str, Any]) -> str:
    """trainer-0, or rollout-0-1 for worker 1 of engine 0. Raises ValueError when the record does not say."""
    role, engine, rank = record.get("role"), record.get("engine"), record.get("rank")
    if role not in tuple(POSITION) or type(rank) is not int or (role == "rollout" and type(engine) is not int):
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
    if ranks + engines * workers > MAX_PROCESSES:
        return [f"{ranks + engines * workers} processes are said to have run, more than the {MAX_PROCESSES} looked for"]
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
    untrained = sorted(set(cases) - trained) if ranks else []
    return [f"no trainer rank called any module of {', '.join(untrained)}"] if untrained else []


def _is_stage(record: Mapping[str, Any]) -> bool:
    """Whether this is one of several pipeline stages of a trainer, of which each holds a part of the modules."""
    parallel = record.get("parallel")
    stages = parallel.get("pp") if isinstance(parallel, Mapping) else None
    return record["role"] == "trainer" and type(stages) is int and stages > 1


def _is_module(module: object) -> bool:
    names = ("group", "boundary")
    return isinstance(module, Mapping) and all(isinstance(module.get(name), str | None) for name in names)


def _check_record(record: Mapping[str, Any], routes: Mapping[str, str], contract: str) -> str | None:
    modules = record.get("modules")
    if not isinstance(modules, Mapping) or not all(map(_is_module, modules.values())):
        return "no modules"
    called: set[str] = set()
    held: set[str] = set() if _is_stage(record) else set(routes)
    for name, module in modules.items():
        group, calls = module.get("group"), _calls(module) + _calls(module, "captured")
        if group not in routes:
            continue
        held.add(group)
        if module.get("route") != routes[group]:
            return f"{name} went route {module.get('route')}, declared for {group} is {routes[group]}"
        if not calls:
            continue
        if str(module.get("implementation")).startswith(OURS) != (routes[group] == "R"):
            return f"{name} is declared {routes[group]}, but {module.get('implementation')} computed it"
        if module.get("nodes", True) in ({}, None):
            return f"{name} is said to have run in a compiled graph, but no node of one is its own"
        called.add(group)
    silent = sorted(held - called)
    if silent:
        return f"no call of any module of {', '.join(silent)}"
    problem = _check_graphs(record) or _check_witnesses(record, routes)
    if problem or "R" not in routes.values():
        return problem
    if record.get("contract") != contract:
        return f"served contract {str(record.get('contract'))[:12]}, the run's is {contract[:12]}"
    if "contract_content" in record and digest_of(record["contract_content"]) != contract:
        return f"the contract's content that it states has not the digest {contract[:12]} of the run's"
    if not _DIGEST.fullmatch(str(record.get("kernels"))):
        return f"the digest of the kernels' binary is {record.get('kernels')!r}, want a sha256"
    return None


def _check_graphs(record: Mapping[str, Any]) -> str | None:
    """A compiled part shows its graphs, and none of ours in them: samebits runs outside of compiled code."""
    if record.get("mode") != "compiled":
        return None
    graphs = record.get("graphs")
    if not isinstance(graphs, list) or not graphs:
        return "it ran compiled, but shows no graph that was compiled"
    for graph in graphs:
        if not isinstance(graph, Mapping) or not _DIGEST.fullmatch(str(graph.get("digest"))):
            return "a compiled graph has no digest"
        if graph.get("samebits") != []:
            return f"a compiled graph of a native process holds {graph.get('samebits')}"
    return None


def _check_witnesses(record: Mapping[str, Any], routes: Mapping[str, str]) -> str | None:
    """The kernels' own counters agree with the modules: ours ran where the route is R, and nowhere else."""
    counters = record.get("counters")
    if not isinstance(counters, Mapping) or not all(type(count) is int for count in counters.values()):
        return "its kernel counters are missing or no integers"
    strict: dict[str, int] = {}
    captured: set[str] = set()
    native: set[str] = set()
    for module in record["modules"].values():
        boundary = module.get("boundary")
        if module.get("group") not in routes or boundary not in WITNESSES:
            continue
        if module["route"] == "R":
            strict[boundary] = max(strict.get(boundary, 0), _calls(module))
            captured |= {boundary} if _calls(module, "captured") else set()
        else:
            native.add(boundary)
    for boundary in _judged_by_others(record):
        strict.pop(boundary, None)
        native.discard(boundary)
    for boundary, calls in strict.items():
        counted = _counted(counters, boundary)
        products = _calls(record, "certified_products") if boundary == "linear" else 0
        if counted + products < calls:
            return f"{boundary} is said to have run {calls} times by samebits, its kernels counted {counted}"
        if boundary in captured and not counted:
            return f"{boundary} is in a graph that was captured, but no replay of it was counted"
    # A kernel that a strict boundary may use, too, says nothing: the fused log-probability multiplies by the LM head.
    used = {name for boundary in strict for name in WITNESSES[boundary]}
    for boundary in sorted(native - set(strict)):
        counted = _counted({name: count for name, count in counters.items() if _kernel(name) not in used}, boundary)
        if counted:
            return f"{boundary} is declared native, but a samebits kernel counted {counted} calls of it"
    return None


def _calls(record: Mapping[str, Any], name: str = "calls") -> int:
    """A count of a record, 0 where it is missing or none."""
    count = record.get(name)
    return count if type(count) is int and count > 0 else 0


def _judged_by_others(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Boundaries whose kernels' counters say nothing here: somebody else's provider, or an audit beside native code."""
    served = record.get("linear_logp")
    if not isinstance(served, Mapping):
        return ()
    foreign = not str(served.get("provider") or OURS).startswith(OURS)
    return ("logprob", "linear") if foreign or served.get("mode") == "audit" else ()


def _counted(counters: Mapping[str, Any], boundary: str) -> int:
    return sum(count for name, count in counters.items() if _kernel(name) in WITNESSES[boundary])


def _kernel(counter: str) -> str:
    """The kernel that a counter counts, without what it says after a dot."""
    return counter.partition(".")[0]
