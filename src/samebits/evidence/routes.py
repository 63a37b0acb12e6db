"""What the route records must show before a zero means something: who ran, by which route, and that it ran.

A record: {"process", "role": "trainer" | "rollout", "rank", "case": {group: "R" | "P"}, "contract",
"modules": {name: {"group", "route", "calls", ...}}, "counters": {kernel: calls}, ...}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

POSITION = {"trainer": 0, "rollout": 1}


def check_routes(
    records: Iterable[Mapping[str, Any]],
    cases: Mapping[str, str],
    contract: str,
    expected: Mapping[str, int],
) -> list[str]:
    """The first fault of the route records against the declared case, or an empty list.

    `expected` gives the number of processes per role.
    """
    found: dict[str, set[str]] = {role: set() for role in POSITION}
    for record in records:
        process, role = str(record.get("process", "?")), record.get("role")
        if role not in POSITION:
            return [f"route record of {process}: role is {role!r}, want one of {', '.join(POSITION)}"]
        if process in found[role]:
            return [f"two route records of {process}"]
        found[role].add(process)
        routes = {group: case.split("/")[POSITION[role]] for group, case in cases.items()}
        problem = _check_record(record, routes, contract)
        if problem:
            return [f"route record of {process}: {problem}"]
    for role, count in expected.items():
        if len(found[role]) != count:
            return [f"{len(found[role])} route records of the {role} side, want {count}"]
    return []


def _check_record(record: Mapping[str, Any], routes: Mapping[str, str], contract: str) -> str | None:
    if record.get("case") != dict(routes):
        return f"ran case {record.get('case')}, declared is {dict(routes)}"
    strict = "R" in routes.values()
    if strict and record.get("contract") != contract:
        return f"served contract {str(record.get('contract'))[:12]}, the run's is {contract[:12]}"
    modules = record.get("modules")
    if not isinstance(modules, Mapping) or not all(isinstance(m, Mapping) for m in modules.values()):
        return "no modules"
    called: set[str] = set()
    for name, module in modules.items():
        group, calls = module.get("group"), module.get("calls")
        if group not in routes:
            continue
        if module.get("route") != routes[group]:
            return f"{name} went route {module.get('route')}, declared for {group} is {routes[group]}"
        if isinstance(calls, int) and calls > 0:
            called.add(group)
    silent = sorted(set(routes) - called)
    if silent:
        return f"no call of any module of {', '.join(silent)}"
    counters = record.get("counters")
    if strict and not (isinstance(counters, Mapping) and any(counters.values())):
        return "no kernel counted a call, so nothing shows that the samebits route ran"
    return None
