"""What is not covered does not start, and what is not proven does not run."""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hosted_engines import Engine, engine_config, hosted
from models import QWEN3, make_model, make_requests

from samebits.contract.routes import ModuleRoutes, Route
from samebits.into_vllm.config import EngineConfig
from samebits.into_vllm.engine import EngineRefused, RolloutEngine
from samebits.into_vllm.patches import SAMPLER
from samebits.into_vllm.places import NotCovered, places_of
from samebits.into_vllm.plan import RoutePlan
from samebits.into_vllm.proof import ProofMissing, check_proofs
from samebits.rl.processes import Host

UNCOVERED = {
    "architecture 'MistralForCausalLM'": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "sliding window": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 0,
    },
    "rope scaling 'linear'": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "activation 'gelu'": {"hidden_act": "gelu"},
}


def refusal_of(path: str) -> str:
    """What `check_config` says about the model in `path`; runs in a process that has vLLM."""
    from vllm import EngineArgs

    from samebits.into_vllm.routing import check_config

    arguments = EngineArgs(model=path, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    try:
        check_config(arguments.create_engine_config(), "cpu")
    except NotCovered as error:
        return str(error)
    return "covered"


def refuse_all(paths: list[str]) -> list[str]:
    return [refusal_of(path) for path in paths]


def test_uncovered_models_are_named(home: Path, tiny: Path) -> None:
    paths = [make_model(home / f"uncovered-{i}", **changes) for i, changes in enumerate(UNCOVERED.values())]
    host = Host("refusals", home / "refusals.log")
    try:
        host.start(refuse_all_host).result(timeout=120)
        said = host.call("answers", [str(p) for p in (*paths, tiny)]).result(timeout=240)
        too_long = engine_config(tiny, max_model_len=100_000)
        assert host.call("left_behind", too_long, str(home)).result(timeout=120) == []
    finally:
        host.kill()
    for words, answer in zip((*UNCOVERED, "covered"), said, strict=True):
        assert words in answer, said


class refuse_all_host:
    def answers(self, paths: list[str]) -> list[str]:
        return refuse_all(paths)

    def left_behind(self, config: EngineConfig, folder: str) -> list[str]:
        """The scratch folders of an engine that was refused, while its error is still looked at."""
        tempfile.tempdir = folder
        with pytest.raises(EngineRefused, match="max_model_len") as held:
            RolloutEngine(config)
        assert held.tb is not None
        return [path.name for path in Path(folder).glob("samebits-*")]


def test_an_engine_does_not_start_on_an_uncovered_module(home: Path) -> None:
    model = make_model(home / "mistral", architectures=["MistralForCausalLM"], model_type="mistral")
    with pytest.raises(EngineRefused, match="NotCovered: architecture 'MistralForCausalLM'"):  # noqa: SIM117
        with hosted(home, "mistral", engine_config(model)):
            pass


def test_a_plugin_that_vllm_did_not_load_is_a_refusal(home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "VLLM_PLUGINS", "nothing")
    with pytest.raises(EngineRefused, match="Load format `samebits` is not supported"):  # noqa: SIM117
        with hosted(home, "no-plugin", engine_config(tiny)):
            pass


def test_another_contract_is_a_refusal(home: Path, tiny: Path) -> None:
    contract: dict[str, Any] = copy.deepcopy(dict(engine_config(tiny).contract))
    contract["boundaries"]["rms_norm"]["version"] += 1
    contract["boundaries"]["attention"]["constants"]["chunk"] = 1024
    fields = r"attention\.constants\.chunk: 1024 \| 512\n  boundaries\.rms_norm\.version: 2 \| 1"
    with pytest.raises(EngineRefused, match=rf"engine 0 holds run contract .*\n  boundaries\.{fields}$"):  # noqa: SIM117
        with hosted(home, "contract", engine_config(tiny, contract=contract)):
            pass


def test_a_model_with_other_constants_is_a_refusal(home: Path, tiny: Path) -> None:
    contract = {**engine_config(tiny).contract, "model": {"rms_norm_eps": "0.125", "temperature": "1.0"}}
    words = r"worker 0 \(process \d+\) holds run contract .*\n  model\.rms_norm_eps: '0\.125' \| '1e-06'$"
    with pytest.raises(ProofMissing, match=words):  # noqa: SIM117
        with hosted(home, "constants", engine_config(tiny, contract=contract)):
            pass


def test_requests_that_vllm_would_change_are_refused(strict: Engine) -> None:
    def one(**changes: Any) -> list[Any]:
        request = make_requests(1, tokens=4)[0]
        return [type(request)(**{**vars(request), **changes})]

    for changes, words in (
        ({"temperature": 0.001}, "would be raised to 0.01"),
        ({"max_tokens": 500}, "does not fit max_model_len 128"),
        ({"seed": -1}, "unsigned 64-bit"),
        ({"prompt_ids": (3, QWEN3["vocab_size"])}, "token ids must be in"),
        ({"prompt_ids": (3, -1)}, "token ids must be in"),
    ):
        with pytest.raises(ValueError, match=words):
            strict("generate", one(**changes))
    assert len(strict("generate", one())) == 1


def test_a_refused_request_leaves_none_of_its_batch_behind(strict: Engine) -> None:
    """They would be answered under the names of later ones."""
    requests = make_requests(3, tokens=12)
    before = strict("generate", requests)
    refused = dataclasses.replace(requests[0], seed=-1)
    with pytest.raises(ValueError, match="unsigned 64-bit"):
        strict("generate", [make_requests(3, tokens=40)[2], refused])
    assert strict("generate", requests) == before


def test_a_recording_that_nobody_took_ends_with_the_next(strict: Engine) -> None:
    quiet = strict("kernels")
    strict("watch", {0: 44})
    assert strict("kernels") != quiet
    strict("watch", {0: 44})
    strict("generate", make_requests(1, tokens=4))
    assert strict("watched")[0]
    assert strict("kernels") == quiet


def test_a_mixed_case_routes_group_by_group(home: Path, tiny: Path) -> None:
    case = ModuleRoutes(attention="R", ffn="P", logp="R")
    with hosted(home, "mixed", engine_config(tiny, case=case)) as engine:
        assert len(engine("generate", make_requests(3, 8))) == 3
        (record,) = engine("proof")
    for name, module in record["modules"].items():
        native = name.endswith(("post_attention_layernorm", "gate_up_proj", "act_fn", "down_proj"))
        assert module["implementation"].startswith("vllm." if native else "samebits."), name
        assert module["calls"] > 0, name


def test_unknown_modules_have_no_place() -> None:
    assert len(places_of(["", "model", "model.norm", "model.layers.3.mlp", "lm_head"])) == 2
    with pytest.raises(NotCovered, match=r"model\.layers\.0\.mlp\.experts"):
        places_of(["model.layers.0.mlp.experts"])


def plan_and_record(logp: Route = "P") -> tuple[RoutePlan, dict[str, Any]]:
    config = EngineConfig(model="m", contract={"segments": 1}, case=ModuleRoutes("R", "P", logp))
    plan = RoutePlan.for_engine(config, threads=1)
    record = {
        "rank": 0,
        "process": 1,
        "plan": plan.digest(),
        "contract": plan.contract_digest,
        "contract_content": dict(plan.contract),
        "kernels": "k",
        "versions": {},
        "patches": [{"symbol": SAMPLER.symbol.path, "in_place": True}],
        "keyed": True,
        "modules": {
            "a": {"group": "attention", "route": "R", "implementation": "samebits.x"},
            "f": {"group": "ffn", "route": "P", "implementation": "vllm.x"},
        },
    }
    return plan, record


def test_proofs_are_checked() -> None:
    plan, record = plan_and_record()
    check_proofs([record], plan, tp=1)
    check_proofs([record, {**record, "rank": 1}], plan, tp=2)
    native = {**record["modules"], "a": {"group": "attention", "route": "R", "implementation": "vllm.x"}}
    for records, words in (
        ([], "1 workers were started, 0 answered"),
        ([None], "the samebits plugin did not load"),
        ([{**record, "plan": "old"}], "plan is 'old'"),
        ([{**record, "contract": "x", "contract_content": {"segments": 2}}], r"worker 0 .*\n  segments: 1 \| 2"),
        ([{**record, "rank": 1}], r"want ranks 0 to 0, got \[1\]"),
        ([{**record, "modules": native}], "a is computed by vllm.x, the plan wants route R"),
    ):
        with pytest.raises(ProofMissing, match=words):
            check_proofs(records, plan, tp=1)
    drawing, record = plan_and_record(logp="R")
    check_proofs([record], drawing, tp=1)
    with pytest.raises(ProofMissing, match="keeps the keys of draws is not loaded"):
        check_proofs([{**record, "keyed": False}], drawing, tp=1)


def test_workers_must_agree() -> None:
    plan, record = plan_and_record()
    with pytest.raises(ProofMissing, match="workers differ in kernels"):
        check_proofs([record, {**record, "rank": 1, "kernels": "x"}], plan, tp=2)


def test_plan_round_trip_and_strictness() -> None:
    plan, _ = plan_and_record()
    assert RoutePlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="exactly the keys"):
        RoutePlan.from_json('{"case": {}}')


def test_configuration_is_checked() -> None:
    for changes, words in (
        ({"tp": 3}, "tp must be a power of two"),
        ({"tp": 2, "max_tp": 1}, "raise max_tp to 2"),
        ({"contract": {}}, "needs the run contract"),
        ({"seed": -1}, "seed must be in"),
        ({"kv_cache_gib": 0}, "kv_cache_gib must be positive"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"threads": -1}, "threads must not be negative"),
        ({"compiled": True}, "samebits runs eagerly"),
    ):
        with pytest.raises(ValueError, match=words):
            EngineConfig(**{"model": "m", "contract": {"segments": 1}, **changes})
    with pytest.raises(ValueError, match="case of ffn must be 'R' or 'P'"):
        ModuleRoutes(ffn="X")  # type: ignore[arg-type]
    assert QWEN3["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn about its dependencies
def test_a_setting_may_be_missing_only_where_older_releases_lack_it() -> None:
    from samebits.into_vllm.layers import Routed

    class Layer(Routed):
        newer = frozenset({"parallel_group"})

        def wants(self) -> dict[str, Any]:
            return {"parallel_group": None, "gather_output": False}

    layer = Layer()
    with pytest.raises(AttributeError, match="gather_output"):
        layer.take("model.layers.0", 1)
    layer.gather_output = False  # type: ignore[attr-defined]
    layer.take("model.layers.0", 1)
    layer.parallel_group = "mine"  # type: ignore[attr-defined]
    with pytest.raises(NotCovered, match="parallel_group is 'mine'"):
        layer.take("model.layers.0", 1)
