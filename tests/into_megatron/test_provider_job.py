"""A real trainer rank behind the provider boundary: strict by default, and what each mode and identity does to it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from samebits.contract.routes import ModuleRoutes
from samebits.into_megatron.config import TrainerConfig
from samebits.linear_logp import LinearLogpProviderUnavailable, LinearLogpRequest, LinearLogpResult, ProviderRejected
from samebits.linear_logp.provider import CONTRACT_ID
from samebits.linear_logp.provider import provider as own_provider
from samebits.testing.ranks import Rank, run_ranks
from samebits.testing.tiny_models import write_tiny_model
from samebits.timeline.types import SampleKey, TrainSample

RUN = "a" * 64


def unavailable(asked: LinearLogpRequest) -> LinearLogpResult:
    raise LinearLogpProviderUnavailable("no such chip")


def broken(asked: LinearLogpRequest) -> LinearLogpResult:
    raise ImportError("a bug, not an absence")


def renamed(asked: LinearLogpRequest) -> LinearLogpResult:
    """The very bits of the samebits provider under another identity."""
    return dataclasses.replace(own_provider(asked), contract_id="somebody.else.v1")


def detached(asked: LinearLogpRequest) -> LinearLogpResult:
    result = own_provider(asked)
    return dataclasses.replace(result, logp=result.logp.detach())


NATIVE = ModuleRoutes(logp="P")
JOBS: dict[str, dict[str, Any]] = {
    "default": {},
    "reference": {"kl_coef": 0.1},
    "expected": {"linear_logp_contract": CONTRACT_ID},
    "renamed, nothing expected": {"linear_logp_provider": "job_stand_ins.renamed"},
    "renamed": {"linear_logp_provider": "job_stand_ins.renamed", "linear_logp_contract": CONTRACT_ID},
    "unavailable strict": {"linear_logp_provider": "job_stand_ins.unavailable"},
    "unavailable auto": {"linear_logp_provider": "job_stand_ins.unavailable", "linear_logp_provider_mode": "auto"},
    "absent auto": {"linear_logp_provider": "not_installed.provider", "linear_logp_provider_mode": "auto"},
    "absent strict": {"linear_logp_provider": "not_installed.provider"},
    "broken auto": {"linear_logp_provider": "job_stand_ins.broken", "linear_logp_provider_mode": "auto"},
    "detached": {"linear_logp_provider": "job_stand_ins.detached"},
    "native": {"case": NATIVE},
    "audit": {"case": NATIVE, "linear_logp_provider_mode": "audit"},
    "audit of a broken one": {
        "case": NATIVE,
        "linear_logp_provider_mode": "audit",
        "linear_logp_provider": "job_stand_ins.broken",
    },
    "same run contract": {"contract": RUN, "rollout_contract": RUN},
    "samples of another contract": {"contract": RUN, "rollout_contract": RUN, "samples_carry": "b" * 64},
    "samples without a contract": {"contract": RUN, "rollout_contract": RUN, "samples_carry": ""},
    "samples with a contract nobody declared": {"samples_carry": RUN},
}


def samples(contract: str) -> list[TrainSample]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for index in range(4):
        ids = tuple(torch.randint(0, 101, (12 + index,), generator=draw).tolist())
        made.append(TrainSample(SampleKey(1, 0, index), ids, 4, 0.5 - index / 4, (0xC0800000,) * (8 + index), contract))
    return made


def run_job(model: str, changes: dict[str, Any]) -> dict[str, Any]:
    from samebits.into_megatron.trainer import TrainerRank

    settings = dict(changes)
    carried = settings.pop("samples_carry", settings.get("rollout_contract", ""))
    if settings.get("kl_coef"):
        settings["reference"] = model
    trainer = None
    try:
        trainer = TrainerRank(TrainerConfig(model=model, max_tokens_per_gpu=30, **settings), 0)
        result = trainer.train_step(1, samples(carried))
    except (ProviderRejected, ValueError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    else:
        record = trainer.proof()
        return {
            "logp": [list(bits) for bits in result.logp_bits.values()],
            "norm": result.grad_norm,
            "linear_logp": record["linear_logp"],
            "module": record["modules"]["log_probability"],
        }
    finally:
        if trainer is None:
            from samebits.into_megatron.parallel import stop_groups

            stop_groups()
        else:
            trainer.close()


def all_jobs(me: Rank, model: str, out: str) -> dict[str, torch.Tensor]:
    module = ModuleType("job_stand_ins")
    module.__dict__.update(unavailable=unavailable, broken=broken, renamed=renamed, detached=detached)
    sys.modules["job_stand_ins"] = module
    Path(out).write_text(json.dumps({name: run_job(model, changes) for name, changes in JOBS.items()}))
    return {}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    home = tmp_path_factory.mktemp("provider_job")
    model = write_tiny_model(home / "model", vocab_size=101)
    run_ranks(__file__, "all_jobs", 1, home / "run", str(model), str(home / "said.json"))
    return json.loads((home / "said.json").read_text())  # type: ignore[no-any-return]


def test_the_provider_scores_by_default_in_strict_mode(jobs: dict[str, dict[str, Any]]) -> None:
    record = jobs["default"]["linear_logp"]
    assert (record["mode"], record["contract"], record["calls"]["native"]) == ("strict", CONTRACT_ID, 0)
    assert record["calls"]["provider"] > 1
    assert jobs["default"]["module"]["route"] == "R"


def test_the_reference_model_goes_through_it_too(jobs: dict[str, dict[str, Any]]) -> None:
    calls = {name: jobs[name]["linear_logp"]["calls"] for name in ("default", "reference")}
    assert calls["reference"] == {"provider": 2 * calls["default"]["provider"], "native": 0}
    assert jobs["reference"]["logp"] == jobs["default"]["logp"]


@pytest.mark.parametrize("name", ["expected", "renamed, nothing expected", "same run contract"])
def test_identities_that_agree_change_no_bit(jobs: dict[str, dict[str, Any]], name: str) -> None:
    assert (jobs[name]["logp"], jobs[name]["norm"]) == (jobs["default"]["logp"], jobs["default"]["norm"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("renamed", "scored under contract 'somebody.else.v1', the other side under"),
        ("unavailable strict", "ProviderRejected: strict: linear_logp_provider 'job_stand_ins.unavailable'"),
        ("absent strict", "ProviderRejected: strict: linear_logp_provider 'not_installed.provider' is unavailable"),
        ("broken auto", "ImportError: a bug, not an absence"),
        ("detached", "logp is detached: no gradient reaches hidden, weight"),
        ("samples of another contract", "sample 1/0/0: scored under run contract bbbbbbbbbbbb, this run wants aaa"),
        ("samples without a contract", "scored under run contract none, this run wants aaaaaaaaaaaa"),
        ("samples with a contract nobody declared", "scored under run contract aaaaaaaaaaaa, this run wants none"),
    ],
)  # fmt: skip
def test_a_step_stops_before_the_loss(jobs: dict[str, dict[str, Any]], name: str, message: str) -> None:
    assert message in jobs[name]["error"]


@pytest.mark.parametrize("name", ["unavailable auto", "absent auto"])
def test_a_fallback_is_native_and_says_so(jobs: dict[str, dict[str, Any]], name: str) -> None:
    fallback = jobs[name]
    assert fallback["linear_logp"]["calls"]["provider"] == 0
    assert fallback["module"]["route"] == "P"
    assert fallback["logp"] != jobs["default"]["logp"]


def test_without_a_provider_nothing_is_asked(jobs: dict[str, dict[str, Any]]) -> None:
    record = jobs["native"]["linear_logp"]
    assert (record["provider"], record["calls"]) == ("", {"provider": 0, "native": 0})


@pytest.mark.parametrize("name", ["audit", "audit of a broken one"])
def test_an_audit_changes_nothing(jobs: dict[str, dict[str, Any]], name: str) -> None:
    assert (jobs[name]["logp"], jobs[name]["norm"]) == (jobs["native"]["logp"], jobs["native"]["norm"])


def test_an_audit_records_what_differs(jobs: dict[str, dict[str, Any]]) -> None:
    audit = jobs["audit"]["linear_logp"]["audit"]
    assert audit["elements"] == sum(len(bits) for bits in jobs["audit"]["logp"])
    assert 0 < audit["mismatches"] <= audit["elements"]
    assert 0 < audit["max_abs_diff"] < 0.1
    assert jobs["audit of a broken one"]["linear_logp"]["audit"]["error"] == "ImportError: a bug, not an absence"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_logp_provider": None}, "comes from a provider"),
        ({"linear_logp_provider_mode": "audit"}, "audit returns Megatron-Core's own"),
        (
            {"contract": RUN, "rollout_contract": "b" * 64},
            "the trainer serves run contract aaaaaaaaaaaa, the engines bbb",
        ),
    ],
)
def test_settings_that_contradict_themselves(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig(model="m", **changes)
