"""Route records: who ran, by which code, and what kernels and compiled graphs show of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tampering import edit_json, reseal

from samebits.evidence.routes import check_routes
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import verify
from samebits.testing.runs import write_run

# A compiled native part shows itself by the nodes of its graphs.
GRAPH = {"digest": "0" * 64, "nodes": 9, "samebits": []}
NATIVE = {
    "good": ({}, {"nodes": {"torch.rsqrt": 1}}, None),
    "no node": ({}, {"nodes": {}}, "no node of one is its own"),
    "no graph": ({"graphs": []}, {}, "shows no graph"),
    "no digest": ({"graphs": [{"digest": "x"}]}, {}, "a compiled graph has no digest"),
    "our code in it": ({"graphs": [{**GRAPH, "samebits": ["samebits.swiglu"]}]}, {}, "holds ['samebits.swiglu']"),
    "our kernels ran": ({"counters": {"linear": 1}}, {}, "linear is declared native, but a samebits kernel counted 1"),
    "strict code under a native label": (
        {},
        {"implementation": "samebits.into_vllm.layers.RoutedRows"},
        "ffn.first is declared P, but samebits.into_vllm.layers.RoutedRows computed it",
    ),
    "eager": ({"mode": "eager"}, {}, "ran eager, declared is compiled"),
}


@pytest.mark.parametrize("name", NATIVE)
def test_a_compiled_native_engine_proves_its_route(tmp_path: Path, name: str) -> None:
    record, module, message = NATIVE[name]
    run = tmp_path / "run"
    write_run(run, case="P/P")
    route = next((run / "routes").glob("*rollout*"))
    edit_json(route, lambda r: r.update({"mode": "compiled", "graphs": [GRAPH], **record}))
    edit_json(route, lambda r: r["modules"]["ffn.first"].update(module))
    edit_json(run / "manifest.json", lambda m: m["config"].update(native_compile=True))
    reseal(run)
    found = verify(run)
    assert found.problems == () if message is None else message in found.problems[0]


@pytest.mark.parametrize(
    ("calls", "captured", "products", "counted", "message"),
    [
        (4, 0, 0, 4, None),
        (4, 9, 0, 4, None),
        (4, 0, 0, 3, "linear is said to have run 4 times by samebits, its kernels counted 3"),
        (4, 9, 0, 3, "linear is said to have run 4 times by samebits, its kernels counted 3"),
        (0, 9, 0, 1, None),
        (0, 9, 0, 0, "linear is in a graph that was captured, but no replay of it was counted"),
        (4, 0, 1, 3, None),
        (4, 0, "1", 3, "its kernels counted 3"),
    ],
)
def test_only_calls_that_a_graph_captured_launch_nothing(
    tmp_path: Path, calls: int, captured: int, products: int | str, counted: int, message: str | None
) -> None:
    run = tmp_path / "run"
    write_run(run)
    route = next((run / "routes").glob("*rollout*"))
    linear = [name for name, m in json.loads(route.read_text())["modules"].items() if m["boundary"] == "linear"]

    def alter(record: dict) -> None:
        record.update(mode="captured", counters={**record["counters"], "linear": counted}, certified_products=products)
        for name in linear:
            record["modules"][name].update(calls=calls, captured=captured)

    edit_json(route, alter)
    reseal(run)
    found = verify(run)
    assert found.verdict is Verdict.SAME if message is None else message in found.problems[0]


@pytest.mark.parametrize(
    ("counters", "message"),
    [
        ({"linear": 0, "linear_logp": 4}, None),
        ({"linear": 1, "linear_logp": 4}, "linear is declared native, but a samebits kernel counted 1"),
        ({"linear": 0, "linear_logp": 3}, "logprob is said to have run 4 times by samebits, its kernels counted 3"),
    ],
)
def test_a_native_linear_beside_a_strict_log_probability(counters: dict[str, int], message: str | None) -> None:
    """The trainer of M001: its own projections, and our LM head fused with the log-probability."""
    module = {"boundary": "linear", "route": "P", "implementation": "megatron.Linear", "calls": 4}
    logp = {"group": "logp", "boundary": "logprob", "route": "R", "implementation": "samebits.linear_logp", "calls": 4}
    record = {
        "role": "trainer",
        "rank": 0,
        "mode": "eager",
        "contract": "c",
        "modules": {"a": {**module, "group": "attention"}, "f": {**module, "group": "ffn"}, "l": logp},
        "counters": counters,
        "kernels": "0" * 64,
    }
    found = check_routes([record], {"attention": "P/P", "ffn": "P/P", "logp": "R/R"}, "c", 1, 0, 0)
    assert found == [] if message is None else message in found[0]
