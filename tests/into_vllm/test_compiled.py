"""vLLM's compiled mode proves its route: by the nodes of the graphs that it compiled, module by module."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hosted_engines import engine_config, hosted
from models import make_requests

from samebits.contract.routes import ModuleRoutes
from samebits.evidence.routes import check_routes
from samebits.into_vllm.compiled import graph_record

NATIVE = dict.fromkeys(("attention", "ffn", "logp"), "P/P")


def problems(record: dict[str, Any], cases: dict[str, str] = NATIVE) -> list[str]:
    """What the verifier finds in this one record, of a run without trainer ranks."""
    return check_routes([record], cases, "", 0, 1, 1)


@pytest.fixture(scope="module")
def record(home: Path, tiny: Path) -> Iterator[dict[str, Any]]:
    config = engine_config(tiny, compiled=True, contract={}, case=ModuleRoutes("P", "P", "P"))
    with hosted(home, "compiled", config) as engine:
        assert all(r.logp_bits for r in engine("generate", make_requests(4, tokens=8)))
        yield engine("proof")[0]


def test_every_module_of_the_compiled_part_has_nodes_of_its_own(record: dict[str, Any]) -> None:
    inner = {name: module for name, module in record["modules"].items() if name.startswith("model.")}
    assert len(inner) > 20
    assert {module["calls"] for module in inner.values()} == {inner["model.norm"]["calls"]}
    assert inner["model.norm"]["calls"] >= 8
    assert "vllm.unified_attention_with_output" in inner["model.layers.0.self_attn.attn"]["nodes"]
    assert "torch.silu" in inner["model.layers.1.mlp.act_fn"]["nodes"]
    (graph,) = record["graphs"]
    assert graph["samebits"] == []
    assert graph["nodes"] >= sum(sum(module["nodes"].values()) for module in inner.values())
    assert problems(record) == []


def test_a_declared_route_that_did_not_run_is_a_failure(record: dict[str, Any]) -> None:
    assert "went route P, declared for ffn is R" in problems(record, {**NATIVE, "ffn": "P/R"})[0]
    relabelled = copy.deepcopy(record)
    relabelled["modules"]["model.layers.0.mlp.act_fn"]["nodes"] = {}
    assert "no node of one is its own" in problems(relabelled)[0]


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.SiLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x)) + x


def test_nodes_are_given_to_the_module_that_made_them() -> None:
    seen: list[dict[str, Any]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(graph_record(graph.graph))
        return graph

    torch.compile(Twice(), backend=keep, fullgraph=True)(torch.ones(2, 4))
    assert set(seen[0]["modules"]) == {"", "layers.0", "layers.1"}
    assert list(seen[0]["modules"]["layers.1"]) == ["torch.silu"]
    assert seen[0]["samebits"] == []


GPU_BACKEND = """
import torch
from vllm.compilation.backends import VllmBackend
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from samebits.into_vllm.compiled import graphs
from samebits.into_vllm.patches import COMPILER
from samebits.into_vllm.settings import _compiler
from samebits.into_vllm.config import EngineConfig
from samebits.contract.routes import ModuleRoutes

native = EngineConfig(model="none", contract={}, case=ModuleRoutes("P", "P", "P"), compiled=True, device="cuda")
config = VllmConfig(**{"compilation_config": CompilationConfig(), **_compiler(native)})
# what a machine without GPUs sets otherwise
settings = config.compilation_config
settings.mode, settings.cudagraph_mode = CompilationMode.VLLM_COMPILE, CUDAGraphMode.NONE
settings.backend, settings.compile_sizes = "eager", []
x = torch.ones(8, 4)
torch._dynamo.mark_dynamic(x, 0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.SiLU()])
    def forward(self, x):
        return self.layers[1](self.layers[0](x)) + x

model = Model()
with COMPILER.applied(), set_current_vllm_config(config):
    found = torch.compile(model, backend=VllmBackend(config), fullgraph=True)(x)
assert torch.equal(found, model(x))
(graph,) = graphs()
print(sorted(graph["modules"]), sorted(graph["modules"]["layers.1"]))
"""


def test_the_backend_of_gpus_shows_its_graphs() -> None:
    # in a process of its own: it changes vLLM's idea of the platform's settings
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", GPU_BACKEND], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "['', 'layers.0', 'layers.1'] ['torch.silu']"


def test_an_operator_of_ours_inside_a_graph_is_named() -> None:
    graph = torch.fx.Graph()
    name = "samebits_swiglu"
    graph.output(graph.call_method(name, (graph.placeholder("x"),)))
    found = graph_record(graph)
    assert found["samebits"] == [name]
    assert found["digest"] != graph_record(torch.fx.Graph())["digest"]
