"""A case that is declared and another that runs: with the real engines, planted behind the configuration's back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from samebits.cli.wiring import engine_arguments, parts
from samebits.contract.routes import ModuleRoutes
from samebits.rl.config import RunConfig
from samebits.rl.job import run_job
from samebits.rl.protocols import RunFailed


def test_an_engine_that_runs_another_case_than_declared_ends_the_run(tmp_path: Path) -> None:
    def native_ffn(*arguments: Any) -> tuple[Any]:
        (config,) = engine_arguments(*arguments)
        return (dataclasses.replace(config, case=ModuleRoutes("R", "P", "R")),)

    config = RunConfig(run_dir=str(tmp_path / "run"), num_rollout=1, global_batch_size=8, eval_interval=0)
    with pytest.raises(RunFailed, match=r"rollout-0-0: model\.layers\.0\.mlp\.\w+ goes route P, declared is R"):
        run_job(config, dataclasses.replace(parts(), engine_arguments=native_ffn))
    assert not (tmp_path / "run" / "seal.json").exists()
