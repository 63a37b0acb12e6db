"""Real Megatron-Core ranks in real processes: one forward, one set of bits, however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_jobs import Results, launch, make_samples, oracle, strict

from samebits.bits import assert_same, first_difference
from samebits.into_megatron.model import read_shape
from samebits.into_megatron.weights import from_megatron
from samebits.testing.tiny_models import write_tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen2-bias": {"architecture": "Qwen2ForCausalLM"},
    "llama": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 4},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(at / name, **changes)) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def one_rank(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    qwen3 = models["qwen3"]
    jobs = {
        "whole": {"config": strict(qwen3, max_tokens_per_gpu=10_000), "steps": 2},
        "cut": {"config": strict(qwen3, max_tokens_per_gpu=90), "steps": 2, "alone": True},
        "threads": {"config": strict(qwen3, max_tokens_per_gpu=10_000, threads=2), "steps": 2},
        "cold": {"config": strict(qwen3, temperature=0.7)},
        "one-segment": {"config": strict(qwen3, max_tp=1)},
        **{name: {"config": strict(path), "steps": 1} for name, path in models.items() if name != "qwen3"},
    }
    return launch(tmp_path_factory.mktemp("one"), 1, jobs)


@pytest.fixture(scope="module")
def again(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    jobs = {"whole": {"config": strict(models["qwen3"], max_tokens_per_gpu=10_000), "steps": 2}}
    return launch(tmp_path_factory.mktemp("again"), 1, jobs)


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    qwen3 = models["qwen3"]
    jobs = {
        "tp": {"config": strict(qwen3, tp=2), "steps": 2},
        "sp": {"config": strict(qwen3, tp=2, sequence_parallel=True, max_tokens_per_gpu=200), "steps": 2},
        "cp": {"config": strict(qwen3, cp=2, max_tokens_per_gpu=200), "steps": 2, "alone": True},
        "tp-tied": {"config": strict(models["qwen3-tied"], tp=2), "steps": 1},
        "tp-bias": {"config": strict(models["qwen2-bias"], tp=2), "steps": 1},
    }
    return launch(tmp_path_factory.mktemp("two"), 2, jobs)


def test_the_batch_is_large_enough_to_show_a_difference() -> None:
    assert sum(sample.response_length for sample in make_samples()) >= 256


@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_the_oracle_s(one_rank: Results, models: dict[str, str], model: str) -> None:
    job = "whole" if model == "qwen3" else model
    expected = oracle(models[model], make_samples())
    assert_same(one_rank(job, "score"), expected, f"{model}: score")
    assert_same(one_rank(job, "logp0"), expected, f"{model}: the forward that is differentiated")


def test_temperature_is_applied_once(one_rank: Results, models: dict[str, str]) -> None:
    assert_same(one_rank("cold", "score"), oracle(models["qwen3"], make_samples(), 0.7), "temperature 0.7")


def test_these_comparisons_can_fail(one_rank: Results, models: dict[str, str], tmp_path: Path) -> None:
    segments = first_difference(one_rank("one-segment", "score"), one_rank("whole", "score"))
    assert segments is not None
    assert segments.count >= 5
    assert first_difference(one_rank("whole", "logp1"), one_rank("whole", "logp0")) is not None


def test_micro_batches_change_no_bit(one_rank: Results) -> None:
    """Not of log-probabilities, gradients, norms, or weights after two steps."""
    assert_same(one_rank("cut", "alone"), one_rank("whole", "score"), "samples scored alone")
    compare_runs(one_rank, "cut", one_rank, "whole")


def test_threads_change_no_bit(one_rank: Results) -> None:
    compare_runs(one_rank, "threads", one_rank, "whole")


def test_the_same_run_twice_gives_the_same_weights(one_rank: Results, again: Results) -> None:
    compare_runs(again, "whole", one_rank, "whole")


def compare_runs(left: Results, left_job: str, right: Results, right_job: str) -> None:
    for what in ("score", "logp0", "logp1", "norms"):
        assert_same(left(left_job, what), right(right_job, what), what)
    for name, grad in right.gradients(right_job, 1)[0].items():
        assert_same(left(left_job, f"grad/{name}"), grad, f"gradient of {name}")
    for name, weight in right.weights(right_job).items():
        assert_same(left.weights(left_job)[name], weight, f"{name} after two steps")


@pytest.mark.parametrize("job", ["tp", "sp", "cp"])
def test_ranks_change_no_bit_of_a_log_probability(two_ranks: Results, one_rank: Results, job: str) -> None:
    if job == "cp":
        # A short sample alone leaves one of the ranks without any active token.
        assert_same(two_ranks("cp", "alone"), one_rank("whole", "score"), "samples scored alone")
    for rank in range(2):
        assert_same(two_ranks(job, "score", rank), one_rank("whole", "score"), f"{job}, rank {rank}: score")
        assert_same(two_ranks(job, "logp0", rank), one_rank("whole", "logp0"), f"{job}, rank {rank}: step 0")


@pytest.mark.parametrize(("job", "single"), [("tp-tied", "qwen3-tied"), ("tp-bias", "qwen2-bias")])
def test_tied_and_biased_models_split_alike(
    two_ranks: Results, one_rank: Results, job: str, single: str, models: dict[str, str]
) -> None:
    assert_same(two_ranks(job, "score"), one_rank(single, "score"), job)
    compare_gradients(two_ranks, job, 2, one_rank, single, models[single])


@pytest.mark.parametrize(("job", "ranks"), [("tp", 2), ("sp", 2), ("cp", 1)])
def test_gradients_of_ranks_agree_with_one_rank(
    two_ranks: Results, one_rank: Results, models: dict[str, str], job: str, ranks: int
) -> None:
    compare_gradients(two_ranks, job, ranks, one_rank, "whole", models["qwen3"])
    assert two_ranks(job, "norms")[0].item() == pytest.approx(one_rank("whole", "norms")[0].item(), rel=2e-3)


def compare_gradients(left: Results, job: str, ranks: int, right: Results, single: str, path: str) -> None:
    """Each rank rounds its part of an input gradient to bf16, so gradients agree closely, not by bits."""
    shape = read_shape(path)
    split = from_megatron(left.gradients(job, ranks), shape)
    whole = from_megatron(right.gradients(single, 1), shape)
    for name, grad in whole.items():
        error = (split[name].double() - grad.double()).norm() / grad.double().norm()
        assert error < 2e-2, f"{job}: gradient of {name} is off by {error:.4f}"


@pytest.mark.parametrize("job", ["tp", "sp", "cp"])
def test_all_ranks_hold_the_same_norm_and_the_first_writes_all_weights(two_ranks: Results, job: str) -> None:
    assert_same(two_ranks(job, "norms", 0), two_ranks(job, "norms", 1), f"{job}: gradient norms")
    assert len(two_ranks.weights(job)) == 2 * 11 + 3


CASES = {
    "P/P/P": {"attention": "P", "ffn": "P", "logp": "P"},
    "R/P/P": {"attention": "R", "ffn": "P", "logp": "P"},
    "P/R/P": {"attention": "P", "ffn": "R", "logp": "P"},
    "P/P/R": {"attention": "P", "ffn": "P", "logp": "R"},
    "R/R/P": {"attention": "R", "ffn": "R", "logp": "P"},
}


def case_jobs(models: dict[str, str], **settings: Any) -> dict[str, dict[str, Any]]:
    names = {name.replace("/", ""): case for name, case in CASES.items()}
    jobs = {
        name: {"config": strict(models["qwen3"], **settings), "case": case, "steps": 2} for name, case in names.items()
    }
    tied = {
        f"{name}-tied": {"config": strict(models["qwen3-tied"], **settings), "case": CASES[case], "steps": 1}
        for name, case in (("PPR", "P/P/R"), ("RRP", "R/R/P"))
    }
    return {**jobs, **tied}


@pytest.fixture(scope="module")
def mixed(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("mixed"), 1, case_jobs(models))


@pytest.fixture(scope="module")
def mixed_two(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("mixed-two"), 2, case_jobs(models, tp=2))


@pytest.mark.parametrize("case", CASES)
def test_native_and_mixed_cases_train_and_differ_in_bits(mixed: Results, one_rank: Results, case: str) -> None:
    job = case.replace("/", "")
    close = mixed(job, "score") - one_rank("whole", "score")
    assert close.abs().max() < 0.5
    assert first_difference(mixed(job, "score"), one_rank("whole", "score")) is not None
    assert mixed(job, "norms")[0].item() == pytest.approx(one_rank("whole", "norms")[0].item(), rel=0.1)


@pytest.mark.parametrize("case", CASES)
def test_native_and_mixed_cases_train_on_two_ranks(mixed_two: Results, mixed: Results, case: str) -> None:
    job = case.replace("/", "")
    assert (mixed_two(job, "score") - mixed(job, "score")).abs().max() < 0.5
    assert mixed_two(job, "norms")[0].item() == pytest.approx(mixed(job, "norms")[0].item(), rel=0.1)


@pytest.mark.parametrize("job", ["PPR-tied", "RRP-tied"])
def test_a_tied_weight_gets_both_of_its_gradients(mixed: Results, one_rank: Results, job: str) -> None:
    """One of the two comes through autograd and one does not: neither may be lost."""
    name = "grad/embedding.word_embeddings.weight"
    ours, strict_ = mixed(job, name).double(), one_rank("qwen3-tied", name).double()
    assert (ours - strict_).norm() / strict_.norm() < 0.1
