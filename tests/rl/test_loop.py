"""The loop against small doubles: what it records is verified, and everything that cannot be trusted stops it."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebits.bits import tree_digest
from samebits.contract import RunContract, digest_of, run_contract
from samebits.evidence.record import Recorder
from samebits.evidence.store import MANIFEST_SCHEMA, WATCHED, RunDirectory
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import verify
from samebits.rl.config import RunConfig
from samebits.rl.loop import Job, draw_seed, run_loop
from samebits.rl.protocols import RunFailed
from samebits.timeline.events import Evaluated, Sampled
from samebits.timeline.types import (
    GenerateRequest,
    Part,
    Prompt,
    Rollout,
    SampleKey,
    ShardDigest,
    StepResult,
    Support,
    TrainSample,
    WeightVersion,
)

CONTRACT = run_contract((), segments=2, model={"rms_norm_eps": 1e-6})
NONE: dict[str, Any] = {}
UNPUBLISHED = WeightVersion(0, "")


class Problems:
    """Prompts with a number in them; the label is the number."""

    def batch(self, step: int, count: int, seed: int) -> tuple[Prompt, ...]:
        indices = [(step * count + at) % 50 for at in range(count)]
        return tuple(Prompt(index=i, token_ids=(1, i + 2), label=str(i), text=str(i)) for i in indices)


def logp_bits(weight: float, tokens: Sequence[int]) -> tuple[int, ...]:
    """A function of weights and tokens that both doubles know."""
    return tuple(struct.unpack("<I", struct.pack("<f", -weight / (token + 1)))[0] for token in tokens)


@dataclasses.dataclass
class FakeTrainer:
    weight: float = 1.0
    result: Callable[[StepResult], StepResult] = lambda result: result
    exported: Callable[[dict[str, str]], dict[str, str]] = lambda digests: digests
    route: str = "R"
    contract: RunContract = CONTRACT
    steps: int = 0

    def train_step(self, step: int, samples: Sequence[TrainSample]) -> StepResult:
        bits = {s.key: logp_bits(self.weight, s.token_ids[s.prompt_length :]) for s in samples}
        self.weight += 0.5
        self.steps += 1
        numbers = {"loss": 0.5, "policy_loss": 0.5, "kl": 0.0, "grad_norm": 1.0, "clip_fraction": 0.0}
        tokens = sum(map(len, bits.values()))
        return self.result(StepResult(step=step, logp_bits=bits, ratio_mean=1.0, tokens=tokens, **numbers))

    def export(self, path: str) -> dict[str, str]:
        tensors = {"w": torch.tensor([[self.weight, 2.0], [3.0, 4.0]]), "b": torch.tensor([1.0])}
        save_file(tensors, Path(path) / "model.safetensors")
        return self.exported({name: tree_digest(tensor) for name, tensor in tensors.items()})

    def lent_digests(self, parts: Sequence[Part]) -> list[str]:
        raise AssertionError("these weights are files")

    def proof(self) -> list[dict[str, Any]]:
        return [route_record("trainer", self.route, self.contract.as_data() if self.route == "R" else NONE)]


@dataclasses.dataclass
class FakeEngine:
    """Holds w as two shards of columns, as a tensor-parallel engine would."""

    weight: float = 0.0
    version: WeightVersion = UNPUBLISHED
    answer: Callable[[list[Rollout]], list[Rollout]] = lambda rollouts: rollouts
    shards: Callable[[list[ShardDigest]], list[ShardDigest]] = lambda shards: shards
    route: str = "R"
    contract: RunContract = CONTRACT
    later: RunContract | None = None
    requests: list[GenerateRequest] = dataclasses.field(default_factory=list)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Rollout]:
        self.requests += requests
        return self.answer([self._rollout(request) for request in requests])

    def _rollout(self, request: GenerateRequest) -> Rollout:
        tokens = tuple(request.seed % (7 + at) for at in range(1 + request.seed % request.max_tokens))
        return Rollout(
            key=request.key,
            prompt_ids=request.prompt_ids,
            token_ids=tokens,
            logp_bits=logp_bits(self.weight, tokens),
            version=self.version,
            contract=CONTRACT.digest() if self.route == "R" else "",
            finish_reason="stop",
            engine=0,
            support=Support.of([[token, token + 1] for token in tokens]) if request.limited else None,
        )

    def publish(self, path: str, version: WeightVersion) -> list[list[ShardDigest]]:
        tensors = load_file(Path(path) / "model.safetensors")
        self.weight, self.version = float(tensors["w"][0, 0]), version
        self.contract = self.later or self.contract
        halves = [tensors["w"][:, at : at + 1] for at in (0, 1)]
        held = [ShardDigest("w", 1, at, at + 1, tree_digest(half)) for at, half in enumerate(halves)]
        held += [ShardDigest("b", 0, 0, 1, tree_digest(tensors["b"]))] * 2
        return [self.shards(held)]

    def proof(self) -> list[dict[str, Any]]:
        return [route_record("rollout", self.route, self.contract.as_data() if self.route == "R" else NONE)]


def route_record(role: str, route: str, content: dict[str, Any]) -> dict[str, Any]:
    groups = ("attention", "ffn", "logp")
    return {
        "role": role,
        "engine": 0,
        "rank": 0,
        "contract": digest_of(content) if content else "",
        "contract_content": content,
        "mode": "eager",
        "modules": {
            group: {"group": group, "route": route, "implementation": "samebits.x" if route == "R" else "x", "calls": 1}
            for group in groups
        },
        "counters": {"k": 1},
        "kernels": "0" * 64,
    }


@dataclasses.dataclass
class Bench:
    """One run directory with doubles on both sides."""

    path: Path
    trainer: FakeTrainer = dataclasses.field(default_factory=FakeTrainer)
    engine: FakeEngine = dataclasses.field(default_factory=FakeEngine)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    record: Recorder | None = None

    def run(self) -> None:
        small = {"num_rollout": 3, "samples_per_prompt": 4, "global_batch_size": 8, "eval_prompts": 5, "max_tp": 2}
        config = RunConfig(run_dir=str(self.path / "run"), **{**small, "eval_interval": 2, **self.settings})
        self.record = Recorder(RunDirectory.create(self.path / "run"))
        job = Job(
            config=config,
            prompts=Problems(),
            held_out=Problems(),
            reward=lambda text, label: float(text.startswith(label[:1])),
            decode=lambda ids: "".join(str(i) for i in ids),
            stop_ids=(0,),
            rollout=self.engine,
            trainer=self.trainer,
            contract=CONTRACT,
            weights=self.path,
        )
        run_loop(job, self.record)
        contract = {"digest": CONTRACT.digest(), "content": CONTRACT.as_data()}
        manifest = {"schema": MANIFEST_SCHEMA, "config": config.model_dump(), "contract": contract}
        seen: dict[str, Any] = {name: {} for name in WATCHED}
        manifest |= {**seen, "after": seen}
        self.record.seal(config.num_rollout, [*self.trainer.proof(), *self.engine.proof()], manifest)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_run_of_equal_sides_verifies_as_same(bench: Bench) -> None:
    bench.run()
    found = verify(bench.path / "run")
    assert (found.verdict, found.problems) == (Verdict.SAME, ())
    assert found.totals["steps"] == bench.trainer.steps == 3
    assert found.totals["compared_tokens"] == found.totals["generated_tokens"] > 100


def test_one_wrong_bit_makes_a_run_different(bench: Bench) -> None:
    def flip(result: StepResult) -> StepResult:
        key = next(iter(result.logp_bits))
        bits = (result.logp_bits[key][0] ^ 1, *result.logp_bits[key][1:])
        return dataclasses.replace(result, logp_bits={**result.logp_bits, key: bits})

    bench.trainer.result = flip
    bench.run()
    found = verify(bench.path / "run")
    assert (found.verdict, found.problems) == (Verdict.DIFFERENT, ())
    assert found.totals["mismatch_count"] == found.totals["steps_with_mismatch"] == 3


def test_supports_travel_to_the_trainer_and_into_the_records(bench: Bench) -> None:
    bench.settings |= {"top_p": 0.9, "top_k": 2}
    given: list[TrainSample] = []
    step = bench.trainer.train_step
    bench.trainer.train_step = lambda at, samples: given.extend(samples) or step(at, samples)  # type: ignore[method-assign]
    bench.run()
    for sample in given:
        assert sample.support is not None
        assert sample.support.problem(sample.token_ids[sample.prompt_length :]) == ""
    found = verify(bench.path / "run")
    assert (found.verdict, found.problems) == (Verdict.SAME, ())
    assert found.sampling.endswith("2.0 ids on average")
    assert {(r.top_k, r.top_p, r.min_p) for r in bench.engine.requests} == {(2, 0.9, 0.0)}


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (lambda tokens: None, "it came without supports"),
        (lambda tokens: Support.of([[token + 1] for token in tokens]), "is not in its support of 1 ids"),
        (lambda tokens: Support.of([[]] * len(tokens)), "a token without a support"),
    ],
)
def test_an_engine_that_keeps_no_record_of_its_supports_stops_the_run(
    bench: Bench, support: Callable[[tuple[int, ...]], Support | None], message: str
) -> None:
    bench.settings["top_p"] = 0.9
    bench.engine.answer = lambda rollouts: [dataclasses.replace(r, support=support(r.token_ids)) for r in rollouts]
    with pytest.raises(RunFailed, match=message):
        bench.run()


def test_a_support_that_nobody_asked_for_stops_the_run(bench: Bench) -> None:
    bench.engine.answer = lambda rollouts: [
        dataclasses.replace(r, support=Support.of([[token] for token in r.token_ids])) for r in rollouts
    ]
    with pytest.raises(RunFailed, match="it came with supports, though nothing limits"):
        bench.run()


def test_a_native_case_needs_no_contract_on_its_samples(bench: Bench) -> None:
    bench.settings["case"] = "P/P"
    bench.engine.route = bench.trainer.route = "P"
    bench.run()
    assert verify(bench.path / "run").verdict is Verdict.SAME


def test_evaluations_come_at_both_ends_and_between_with_keys_of_their_own(bench: Bench) -> None:
    bench.run()
    assert bench.record is not None
    assert [e.step for e in bench.record.events if isinstance(e, Evaluated)] == [0, 2, 3]
    keys = [request.key for request in bench.engine.requests]
    assert len(set(keys)) == len(keys) == 3 * 8 + 3 * 5
    assert len({request.seed for request in bench.engine.requests}) == len(keys)


def test_the_same_job_twice_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Bench(tmp_path / name).run()
    for step in (1, 2, 3):
        name = f"run/steps/step_{step:05d}.safetensors"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_seed_depends_on_the_name_of_the_sample_alone() -> None:
    assert draw_seed(1, SampleKey(2, 3, 4)) == draw_seed(1, SampleKey(2, 3, 4)) < 2**63
    names = [SampleKey(s, p, k) for s in range(9) for p in range(9) for k in range(-1, 9)]
    assert len({draw_seed(seed, name) for seed in (1, 2) for name in names}) == 2 * len(names)


def edit(index: int, **fields: Any) -> Callable[[list[Rollout]], list[Rollout]]:
    def answer(rollouts: list[Rollout]) -> list[Rollout]:
        return [dataclasses.replace(r, **fields) if at == index else r for at, r in enumerate(rollouts)]

    return answer


ROLLOUT_FAULTS = {
    "old weights": (edit(1, version=WeightVersion(7, "x")), "generated under weights v7:x"),
    "another digest": (edit(1, version=WeightVersion(0, "x")), "generated under weights v0:x"),
    "another contract": (edit(2, contract="c"), "scored under run contract c"),
    "no contract": (edit(2, contract=""), "scored under run contract none"),
    "no token": (edit(0, token_ids=(), logp_bits=()), "returned no token"),
    "too many tokens": (edit(0, token_ids=(1,) * 99, logp_bits=(1,) * 99), "99 tokens, at most 64"),
    "a gap": (edit(0, token_ids=(1, 2), logp_bits=(1,)), "1 log-probabilities for 2 tokens"),
    "another prompt": (edit(0, prompt_ids=(9,)), "another sample or prompt"),
    "another key": (edit(0, key=SampleKey(9, 9, 9)), "another sample or prompt"),
    "a lost sample": (lambda rollouts: rollouts[:-1], "4 rollouts for 5 requests"),
}


@pytest.mark.parametrize("name", ROLLOUT_FAULTS)
def test_an_untrustworthy_rollout_stops_the_run(bench: Bench, name: str) -> None:
    bench.engine.answer, message = ROLLOUT_FAULTS[name]
    with pytest.raises(RunFailed, match=message):
        bench.run()
    assert verify(bench.path / "run").verdict is Verdict.CANNOT_TELL


def change(**fields: Any) -> Callable[[StepResult], StepResult]:
    return lambda result: dataclasses.replace(result, **fields)


def without_one(result: StepResult) -> StepResult:
    return dataclasses.replace(result, logp_bits=dict(list(result.logp_bits.items())[1:]))


def shorter(result: StepResult) -> StepResult:
    return dataclasses.replace(result, logp_bits={k: bits[1:] for k, bits in result.logp_bits.items()})


RESULT_FAULTS = {
    "another step": (change(step=9), "answered for step 9, want step 1"),
    "no sample": (change(logp_bits={}), "scored 0 of 8 samples"),
    "a lost sample": (without_one, "scored 7 of 8 samples; missing: 1/2/0"),
    "lost tokens": (shorter, "the trainer scored"),
    "no loss": (change(loss=float("nan")), "loss is nan"),
    "no gradient": (change(grad_norm=float("inf")), "grad_norm is inf"),
}


@pytest.mark.parametrize("name", RESULT_FAULTS)
def test_an_untrustworthy_training_step_stops_the_run(bench: Bench, name: str) -> None:
    bench.trainer.result, message = RESULT_FAULTS[name]
    with pytest.raises(RunFailed, match=message):
        bench.run()
    assert bench.record is not None
    assert sum(isinstance(event, Sampled) for event in bench.record.events) == 8


PUBLICATION_FAULTS = {
    "a shard differs": (
        lambda held: [dataclasses.replace(held[0], digest="x"), *held[1:]],
        r"'w' \[0:1\] differs from the published weights",
    ),
    "a shard is missing": (lambda held: held[1:], "'w' is not fully accounted for"),
    "a parameter is missing": (lambda held: held[:2], "'b' is not fully accounted for"),
    "nothing": (lambda held: [], "is not fully accounted for"),
    "a stranger": (lambda held: [*held, ShardDigest("z", 0, 0, 1, "x")], "not published: 'z'"),
    "rows that do not exist": (lambda held: [ShardDigest("w", 0, 1, 3, "x")], "do not exist"),
}


@pytest.mark.parametrize("name", PUBLICATION_FAULTS)
def test_weights_that_did_not_arrive_stop_the_run(bench: Bench, name: str) -> None:
    bench.engine.shards, message = PUBLICATION_FAULTS[name]
    with pytest.raises(RunFailed, match=message):
        bench.run()


def test_an_export_that_is_not_what_the_trainer_holds_stops_the_run(bench: Bench) -> None:
    bench.trainer.exported = lambda digests: {**digests, "w": "x"}
    with pytest.raises(RunFailed, match="'w': the exported file does not hold the trainer's bits"):
        bench.run()
    bench.trainer.exported = lambda digests: {"w": digests["w"]}


def test_sides_under_different_contracts_stop_the_run_before_anything_is_published(bench: Bench) -> None:
    other = bench.trainer.contract = run_contract((), segments=4, model={"rms_norm_eps": 1e-5})
    message = (
        rf"trainer-0 holds run contract {other.digest()[:12]}, the run is under {CONTRACT.digest()[:12]}: .*"
        r"\n  model\.rms_norm_eps: '1e-06' \| '1e-05'\n  segments: 2 \| 4$"
    )
    with pytest.raises(RunFailed, match=message):
        bench.run()
    assert bench.engine.version is UNPUBLISHED


def test_a_contract_that_changes_later_stops_the_run_at_the_next_weight_version(bench: Bench) -> None:
    bench.engine.later = run_contract((), segments=8, model={"rms_norm_eps": 1e-6})
    with pytest.raises(RunFailed, match=r"rollout-0-0 holds run contract .*\n  segments: 2 \| 8$"):
        bench.run()
    assert bench.engine.version.counter == 0


def test_a_digest_that_is_not_that_of_the_content_stops_the_run(bench: Bench, monkeypatch) -> None:
    real = bench.trainer.proof
    content = {**CONTRACT.as_data(), "segments": 4}
    monkeypatch.setattr(bench.trainer, "proof", lambda: [{**real()[0], "contract_content": content}])
    with pytest.raises(RunFailed, match=r"trainer-0 says that it serves run contract .*, but shows another one's"):
        bench.run()


def test_a_side_that_goes_another_route_stops_the_run(bench: Bench) -> None:
    bench.trainer.route = "P"
    with pytest.raises(RunFailed, match="trainer-0: attention goes route P, declared is R"):
        bench.run()


def test_a_full_disk_keeps_the_earlier_records_and_leaves_no_seal(bench: Bench, monkeypatch) -> None:
    write = RunDirectory.write

    def full(run: RunDirectory, name: str, content: bytes) -> str:
        if name.endswith("step_00002.safetensors"):
            raise OSError(28, "No space left on device", name)
        return write(run, name, content)

    monkeypatch.setattr(RunDirectory, "write", full)
    with pytest.raises(OSError, match="No space left"):
        bench.run()
    found = verify(bench.path / "run")
    assert found.verdict is Verdict.CANNOT_TELL
    assert "not sealed" in found.problems[0]
    assert found.totals["steps"] == 1
