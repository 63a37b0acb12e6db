"""The plan of an ablation: one job, its arms and views. It is written down first, and a folder holds one plan only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.ablate.arms import Arm
from samebits.ablate.table import PLAN
from samebits.contract import RunContract
from samebits.contract.routes import MODULES
from samebits.evidence.store import json_bytes, write_whole
from samebits.rl.config import RunConfig, load_config
from samebits.rl.inputs import Inputs
from samebits.rl.job import package_versions
from samebits.timeline.events import parse_json

SCHEMA = "samebits.ablation_plan/1"
FREE, EQUAL = "free", "equal"
VIEWS = (FREE, EQUAL)
_OWN = ("case", *(f"{module}_case" for module in MODULES))
# Where an arm's records lie, and whose tokens it repeats: not what is measured.
PLACES = ("run_dir", "replay_tokens")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`config` is the job that every arm runs; `source` names the arm whose tokens the equal-work view replays."""

    config: RunConfig
    arms: tuple[Arm, ...]
    views: tuple[str, ...]
    source: Arm
    folder: Path

    def path(self, view: str, arm: Arm) -> Path:
        """The run directory of one arm in one view."""
        return self.folder / view / arm.name

    def config_of(self, view: str, arm: Arm) -> RunConfig:
        """The settings of one arm. vLLM's compiled mode is for native engines, so other arms leave it out."""
        settings = self.config.model_dump()
        settings |= {f"{module}_case": case for module, case in arm.by_module().items()}
        settings["run_dir"] = str(self.path(view, arm))
        settings["native_compile"] = self.config.native_compile and arm.is_native_rollout
        if view == EQUAL:
            settings["replay_tokens"] = str(self.path(FREE, self.source))
        return RunConfig(**settings)

    def as_data(self, inputs: Inputs, contract: RunContract) -> dict[str, Any]:
        """What a folder is held to: all that could change a number in the table."""
        return {
            "schema": SCHEMA,
            "config": {key: value for key, value in self.config.model_dump().items() if key not in PLACES},
            "arms": [arm.name for arm in self.arms],
            "views": list(self.views),
            "tokens_of": self.source.name,
            "contract": contract.digest(),
            "packages": dict(package_versions()),
            "inputs": inputs.fingerprints(),
        }


def make_plan(
    flags: Mapping[str, Any],
    file: Path | None,
    *,
    arms: Sequence[Arm],
    view: str = "both",
    source: Arm | None = None,
    folder: Path,
) -> Plan:
    """The plan for the settings of `samebits run`, flags over file; a case in the file is left aside.

    Arms do not evaluate unless an evaluation interval is given. Raises ValueError for a wrong setting, one that the
    ablation sets itself, an unknown view, and a source that is no arm.
    """
    for key in (*_OWN, "replay_tokens"):
        if key in flags:
            raise ValueError(f"{key}: an ablation sets it for each arm; leave it out, or use `samebits run`")
    config = load_config({**dict.fromkeys(_OWN, "P/P"), **flags}, file)
    if "eval_interval" not in config.model_fields_set:
        config = config.model_copy(update={"eval_interval": 0})
    views = {FREE: (FREE,), EQUAL: VIEWS, "both": VIEWS}.get(view)
    if views is None:
        raise ValueError(f"view: want {FREE}, {EQUAL} or both, got {view!r}")
    chosen = source or next((arm for arm in reversed(arms) if arm.is_strict), arms[-1])
    if chosen not in arms:
        raise ValueError(f"tokens_of: {chosen.name} is no arm of this ablation: {', '.join(arm.name for arm in arms)}")
    plan = Plan(config=config, arms=tuple(arms), views=views, source=chosen, folder=folder)
    for arm in arms:
        plan.config_of(FREE, arm)
    return plan


def open_folder(plan: Plan, data: Mapping[str, Any]) -> bool:
    """Writes the plan into its folder, or finds the same one there: then True, and the ablation goes on.

    Raises ValueError that names what differs when the folder holds another plan, and when it holds something else.
    """
    folder, file = plan.folder, plan.folder / PLAN
    if not file.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} exists and holds no ablation: choose another --run-dir or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json_bytes(data))
        return False
    found = parse_json(file.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a JSON object")
    differing = _differences(found, data)
    if differing:
        raise ValueError(
            f"{folder} holds another ablation: {'; '.join(differing[:4])}. Choose another --run-dir, or remove it"
        )
    return True


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any], path: str = "") -> list[str]:
    """One phrase per value that differs: its name, what lies there, what was asked for."""
    differing = []
    for key in dict.fromkeys((*wanted, *found)):
        left, right = found.get(key), wanted.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            differing += _differences(left, right, f"{path}{key}.")
        elif left != right:
            differing.append(f"{path}{key} was {left!r:.80}, now {right!r:.80}")
    return differing
