"""From the run's settings to the trainer's: strict by default, identities from the run contract."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.cli.wiring import run_contract_of, trainer_arguments
from samebits.contract import run_contract
from samebits.contract.boundaries import BOUNDARIES
from samebits.linear_logp.provider import CONTRACT_ID
from samebits.linear_logp.select import OWN_PROVIDER
from samebits.rl.config import RunConfig
from samebits.rl.loop import train_step
from samebits.testing.tiny_models import write_tiny_model
from samebits.timeline.types import Rollout, SampleKey, TrainSample, WeightVersion


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_model(tmp_path_factory.mktemp("job") / "model", vocab_size=64))


def trainer(model: Path, **changes: Any) -> Any:
    config = RunConfig(**changes)
    inputs: Any = SimpleNamespace(model=model, reference=model)
    contract = run_contract(BOUNDARIES, segments=config.segments)
    return trainer_arguments(config, inputs, contract, 0, model)[0], contract.digest()


def test_a_run_scores_through_the_boundary_in_strict_mode(model: Path) -> None:
    config, digest = trainer(model)
    assert (config.linear_logp_provider, config.linear_logp_provider_mode) == (OWN_PROVIDER, "strict")
    assert (config.contract, config.rollout_contract) == (digest, digest)
    assert config.linear_logp_contract == CONTRACT_ID


def test_the_arithmetic_of_a_card_is_part_of_what_a_provider_promises(model: Path) -> None:
    inputs: Any = SimpleNamespace(model=model, reference=model)
    contract = run_contract(BOUNDARIES, segments=1, arithmetic="sm90")
    config, _ = trainer_arguments(RunConfig(device="cuda"), inputs, contract, 0, model)
    assert (config.device, config.linear_logp_contract) == ("cuda", f"{CONTRACT_ID}:sm90")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_run_without_its_device_is_refused_before_anything_starts(model: Path) -> None:
    inputs: Any = SimpleNamespace(model=model, reference=model)
    with pytest.raises(ValueError, match="device cuda: torch sees no CUDA device here"):
        run_contract_of(RunConfig(device="cuda"), inputs)


@pytest.mark.parametrize(
    ("case", "own", "theirs", "scored"),
    [("R/P", True, False, None), ("P/R", False, True, CONTRACT_ID), ("P/P", False, False, None)],
)
def test_a_native_side_has_no_identity(model: Path, case: str, own: bool, theirs: bool, scored: str | None) -> None:
    config, digest = trainer(model, case=case)
    assert (config.contract, config.rollout_contract) == (digest if own else "", digest if theirs else "")
    assert config.linear_logp_contract == scored


def test_settings_reach_the_trainer(model: Path) -> None:
    path = "samebits.linear_logp.provider.provider"
    config, _ = trainer(model, linear_logp_provider=path, linear_logp_provider_mode="auto")
    assert (config.linear_logp_provider, config.linear_logp_provider_mode) == (path, "auto")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_logp_provider_mode": "audit"}, "audit keeps the native"),
        ({"linear_logp_provider": " "}, "route R needs one"),
        ({"linear_logp_provider_mode": "lenient"}, "linear_logp_provider_mode"),
    ],
)
def test_a_run_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig(**changes)


def test_an_audit_is_for_the_native_trainer() -> None:
    assert RunConfig(case="P/P", linear_logp_provider_mode="audit").routes("trainer")["logp"] == "P"


def test_the_contract_that_scored_a_response_travels_with_it_to_the_trainer() -> None:
    received: list[TrainSample] = []

    class Stop(Exception):
        pass

    def take(step: int, samples: list[TrainSample]) -> None:
        received.extend(samples)
        raise Stop

    rollout = Rollout(SampleKey(1, 0, 0), (1,), (2,), (0,), WeightVersion(0, "w"), "contract of the engine", "stop", 0)
    job: Any = SimpleNamespace(trainer=SimpleNamespace(train_step=take))
    with pytest.raises(Stop):
        train_step(job, 1, [rollout], [0.5])
    assert [sample.rollout_contract for sample in received] == ["contract of the engine"]
