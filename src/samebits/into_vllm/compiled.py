"""What vLLM's compiled mode really compiled: the nodes of its graphs, by the module that each came from.

Module hooks do not fire inside a compiled part. Every graph is seen before it is lowered, on a CPU by a pass of the
compiler, on a GPU on its way into vLLM's backend (`patches.py`), and each node names the module whose code it is. How
often the compiled part ran is counted by the attention operator, which it calls back in every layer.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

_graphs: list[dict[str, Any]] = []
_PART = re.compile(r"\['(\w+)'\]|\.(\w+)|\[(\d+)\]")
_PLUMBING = {"_modules", "_parameters", "_buffers"}


class GraphWitness(CustomGraphPass):
    """A pass that changes nothing and writes down what it sees."""

    def __call__(self, graph: fx.Graph) -> None:
        see(graph)

    def uuid(self) -> str:
        """Part of the compiler's cache key: graphs that were compiled unseen are compiled again."""
        return "samebits.graph_witness.1"


def see(graph: fx.Graph) -> None:
    """Write down a graph that is about to be compiled."""
    _graphs.append(graph_record(graph))


def inductor_settings() -> dict[str, Any]:
    """Settings of the compiler under which every graph is seen, also one whose code lies in its cache."""
    return {"pre_grad_custom_pass": GraphWitness(), "pre_grad_pass_timing": "early"}


def graphs() -> list[dict[str, Any]]:
    """One record per graph that was compiled in this process."""
    return list(_graphs)


def graph_record(graph: fx.Graph) -> dict[str, Any]:
    """The nodes of a graph: their number, a digest over operators and modules, operators by module, and any of ours."""
    digest = hashlib.sha256()
    modules: dict[str, Counter[str]] = {}
    nodes, ours = 0, set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        target, module = _target(node.target), module_of(node)
        nodes += 1
        digest.update(f"{node.op} {target} {module}\n".encode())
        modules.setdefault(module, Counter())[target] += 1
        if "samebits" in target:
            ours.add(target)
    return {
        "nodes": nodes,
        "digest": digest.hexdigest(),
        "samebits": sorted(ours),
        "modules": {name: dict(sorted(found.items())) for name, found in sorted(modules.items())},
    }


def module_of(node: fx.Node) -> str:
    """The module, by its name below the compiled one, whose forward made this node; empty for the compiled one."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    parts = [next(filter(None, found.groups())) for found in _PART.finditer(path.removeprefix("L['self']"))]
    return ".".join(part for part in parts if part not in _PLUMBING)


def _target(target: Any) -> str:
    """A short name of what a node calls: a method, vllm.unified_attention_with_output, torch.rsqrt."""
    if isinstance(target, str) or "OpOverload" in type(target).__name__:
        return str(target)
    return f"{target.__module__.partition('.')[0].lstrip('_')}.{target.__name__}"


def count_calls(attention: Any) -> list[int]:
    """Counts, in the list that comes back, how often one attention layer's own code computes from now on."""
    calls = [0]
    forward: Callable[..., Any] = attention.impl.forward

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return forward(*args, **kwargs)

    attention.impl.forward = counted
    return calls
