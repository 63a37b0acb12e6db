"""Real layouts of real engines, all pairs compared; what was done is not done again; what is wrong shows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import broken_parts
import pytest
from typer.testing import CliRunner

from samebits.cli.main import app
from samebits.cli.wiring import parts
from samebits.into_megatron.model import read_shape
from samebits.into_megatron.plan import TrainLayout, plan
from samebits.matrix import read_matrix, run_matrix
from samebits.matrix.model import write_model
from samebits.matrix.record import RECORD, TABLE, markdown
from samebits.rl.inputs import PRESETS

ROOT = Path(__file__).parents[2]
TRAINERS = ("tp1", "tp2-sp", "cp2", "cp2-allgather", "pp2", "dp2")
ROLLOUTS = ("tp1", "tp2", "tp4")


def without(text: str, *layouts: str) -> str:
    """A matrix file without some of its layouts."""
    tables = text.split("\n[")
    return "\n[".join(table for table in tables if table.split("]")[0] not in layouts)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make matrix` compares, without its four trainer ranks and its two engines, which have their own tests."""
    target = tmp_path_factory.mktemp("file") / "small.toml"
    target.write_text(without((ROOT / "recipes/topology.toml").read_text(), "trainer.tp4", "rollout.engines2"))
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def record(file: Path, folder: Path) -> dict[str, Any]:
    return run_matrix(read_matrix(file, {}), folder, parts(), print)


def test_every_pair_of_layouts_has_the_same_bits(record: dict[str, Any]) -> None:
    assert [(p["trainer"], p["rollout"]) for p in record["pairs"]] == [(t, r) for t in TRAINERS for r in ROLLOUTS]
    assert len(record["pairs"]) >= 16
    for pair in record["pairs"]:
        assert pair["verdict"] == "same", pair
        assert pair["compared_tokens"] >= 256
        assert pair["mismatch_count"] == 0
        assert pair["logp_as_reference"]
    assert len({pair["logp"] for pair in record["pairs"]}) == 1


def test_training_steps_are_the_same_in_every_trainer_layout(record: dict[str, Any]) -> None:
    steps = [record["layouts"][f"trainer {name}"]["steps"] for name in TRAINERS]
    assert all(len(taken) == record["steps"] == 2 for taken in steps)
    assert steps[0][0]["weights"] != steps[0][1]["weights"]
    for name, taken in zip(TRAINERS, steps, strict=True):
        for number, step in enumerate(taken):
            for what in ("logp", "loss", "weights"):
                assert step[what] == steps[0][number][what], f"{name}, step {number + 1}: {what}"
    assert record["verdict"] == "same"


def test_the_files_say_what_the_record_says(record: dict[str, Any], folder: Path) -> None:
    assert json.loads((folder / RECORD).read_text()) == record
    page = (folder / TABLE).read_text()
    assert page == markdown(record)
    assert page.count("| same |") == len(record["pairs"])


def test_a_second_call_takes_over_what_was_done(record: dict[str, Any], file: Path, folder: Path) -> None:
    said: list[str] = []
    again = run_matrix(read_matrix(file, {}), folder, parts(), said.append)
    assert again == record
    assert len(said) == len(TRAINERS) + len(ROLLOUTS) - 1
    assert all("taken over" in line for line in said)


def test_a_trainer_that_rounds_its_partial_sums_is_seen(record: dict[str, Any], file: Path, folder: Path) -> None:
    layout = folder / "layouts/trainer-tp2-sp.json"
    kept = layout.read_text()
    layout.unlink()
    broken = dataclasses.replace(parts(), trainer=broken_parts.build_rounding_trainer)
    try:
        found = run_matrix(read_matrix(file, {}), folder, broken)
    finally:
        layout.write_text(kept)
    assert found["verdict"] == "different"
    for pair in found["pairs"]:
        assert pair["verdict"] == ("different" if pair["trainer"] == "tp2-sp" else "same")
        assert pair["logp_as_reference"] == (pair["trainer"] != "tp2-sp")
    wrong = next(pair for pair in found["pairs"] if pair["trainer"] == "tp2-sp")
    assert wrong["mismatch_count"] > 10
    assert "| different |" in markdown(found)


def test_a_layout_that_does_not_start_costs_only_its_own_pairs(
    record: dict[str, Any], file: Path, folder: Path
) -> None:
    (folder / "layouts/trainer-cp2.json").unlink()
    broken = dataclasses.replace(parts(), trainer=broken_parts.build_no_trainer)
    found = run_matrix(read_matrix(file, {}), folder, broken)
    assert found["verdict"] == "cannot tell"
    for pair in found["pairs"]:
        assert pair["verdict"] == ("cannot tell" if pair["trainer"] == "cp2" else "same")
    assert "has no memory left" in markdown(found)


def run(file: Path, *words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["run", "--matrix", str(file), "--matrix-dir", str(file.parent / "out"), *words])
    return found.exit_code, found.output


EDITS = [
    ("train_tp = 2", "train_tp = 3", "layout tp2-sp with tp1: train_tp 3 is not a power of two", "2 and 4"),
    ("rollout_tp = 4", "rollout_tp = 6", "layout tp1 with tp4: rollout_tp 6 is not a power of two", "4 and 8"),
    ("rollout_tp = 4", "rollout_tp = 16", "pair tp1 with tp4: rollout_tp 16: attention: query heads (8)", "works: 8"),
    ("train_pp = 2", "train_pp = 8", "pair pp2 with tp1: pipeline: layers", "nearest layout that works"),
    ("train_cp = 2", "rollout_tp = 2", "[trainer.cp2]: rollout_tp is no setting of a trainer layout", "in [job]"),
    ("train_cp = 2", "train_c = 2", "layout cp2", "did you mean 'train_cp'?"),
    ("intermediate_size = 128", "intermediate_size = 98", "(98) does not divide by 4", "works"),
    ("steps = 2", "form = 'dream'", "form must be one of score, train, got 'dream'", ""),
    ("steps = 2", "pairs = [['tp1', 'tp9']]", "pairs: ['tp1', 'tp9'] is not [trainer layout, rollout layout]", ""),
    ("steps = 2", "pairs = 2", "pairs must be a list, got 2", ""),
    ("steps = 2", "steps = 2\npairs = []", "pairs: want each pair once, and at least one", "leave it out"),
    ("steps = 2", "steps = 2\npairs = [['tp1', 'tp2'], ['tp1', 'tp2']]", "pairs: want each pair once", ""),
    ("steps = 2", "steps = true", "steps must be a number from 0 on, got True", ""),
    ("steps = 2", "steps = 0", "same_weights compares what steps lead to", "leave same_weights out"),
    ("steps = 2", "steps = 2\nform = 'train'", "form train takes num_rollout steps", "leave steps out"),
    ("max_prompt_length = 64", "max_prompt_length = -1", "[job]: max_prompt_length: Input should be greater than", ""),
    ("max_prompt_length = 64", "max_tp = 'all'", "[job]: max_tp: Input should be a valid integer", ""),
    ("same_weights = true", "same_weights = 'no'", "same_weights must be true or false, got 'no'", ""),
    ("max_prompt_length = 64", "run_dir = 'x'", "a matrix has no run_dir", "--matrix-dir says where"),
    ("max_prompt_length = 64", "save_model = true", "form score keeps no model", "form train"),
    ("max_prompt_length = 64", "replay_tokens = 'x'", "form score draws its own tokens", "form train"),
    ("[rollout.tp1]", "[rollout.'TP 1']", "want a name of small letters, digits and dashes", ""),
    ("steps = 2", "stops = 2", "unknown key 'stops'", "known: form, steps"),
    (
        "max_prompt_length = 64",
        "max_prompt_length = 8",
        "the shortest of 6000 prompts has",
        "that max_prompt_length allows",
    ),
]


@pytest.mark.parametrize(("old", "new", "rule", "hint"), EDITS)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, old: str, new: str, rule: str, hint: str
) -> None:
    target = tmp_path / "matrix.toml"
    text = (ROOT / "recipes/topology.toml").read_text()
    assert old in text
    target.write_text(text.replace(old, new, 1))
    code, output = run(target)
    flat = " ".join(output.split())
    assert code == 2
    assert rule in flat
    assert hint in flat
    assert not (tmp_path / "out" / "logs").exists()


def test_scores_over_kept_tokens_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "matrix.toml"
    text = (ROOT / "recipes/topology.toml").read_text().replace("same_weights = true", "")
    target.write_text(text.replace("strict_gradients = true", "top_p = 0.9"))
    code, output = run(target)
    assert (code, "form score knows no top_k, top_p and min_p" in " ".join(output.split())) == (2, True)


def test_tensor_parallelism_of_the_job_counts_among_its_layouts(tmp_path: Path) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text("[job]\nrollout_tp = 4\n[trainer.two]\ntrain_tp = 2\n[rollout.as-in-the-job]\n")
    assert read_matrix(file, {}).max_tp == 4
    file.write_text("[job]\nrollout_tp = 4\n[trainer.two]\ntrain_tp = 2\n[rollout.two]\nrollout_tp = 2\n")
    assert read_matrix(file, {}).max_tp == 4


def test_a_matrix_holds_all_its_settings(tmp_path: Path) -> None:
    code, output = run(ROOT / "recipes/topology.toml", "--print-config", "toml")
    assert (code, "leave out config and print_config" in output) == (2, True)
    found = CliRunner().invoke(app, ["run", "--matrix-dir", str(tmp_path)])
    assert (found.exit_code, "give its file with --matrix" in found.output) == (2, True)


def test_the_layouts_of_one_card_can_be_served_and_make_the_same_micro_batches(tmp_path: Path) -> None:
    matrix = read_matrix(ROOT / "recipes/topology-gpu.toml", {})
    shape = read_shape(write_model(tmp_path / "model", matrix.model, PRESETS / "arithmetic/model"))
    ranks = set()
    for trainer, rollout in matrix.pairs:
        config = matrix.config(trainer, rollout)
        sizes = {name: getattr(config, f"train_{name}") for name in ("tp", "sequence_parallel", "cp", "pp", "dp")}
        plan(TrainLayout(**sizes), shape, matrix.max_tp, config.strict_gradients)
        # a card's gradients depend on how samples are grouped, and a rank's limit counts its own part
        assert config.max_tokens_per_gpu * config.train_cp == matrix.config("tp1", None).max_tokens_per_gpu
        ranks.add(config.trainer_ranks)
    assert ranks == {1, 2, 4, 8}
