"""A small sealed run directory without engines: for tests of verifying and reporting, here and elsewhere."""

from __future__ import annotations

import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from samebits.contract import run_contract
from samebits.contract.routes import MODULES
from samebits.evidence.record import Recorder
from samebits.evidence.routes import POSITION
from samebits.evidence.sidecar import StepSample
from samebits.evidence.store import MANIFEST_SCHEMA, RunDirectory
from samebits.timeline.events import SCHEMA, Evaluated, RunStarted, Timed, Trained
from samebits.timeline.types import Rollout, SampleKey, Support, WeightVersion

CONTRACT = run_contract((), segments=1, model={"temperature": 1.0, "vocab_size": 64})
PROMPTS, SAMPLES = 2, 3
CLIP = 0.2
_WATCHED: dict[str, Any] = {
    "packages": {"samebits": "0"},
    "platform": {"cpus": 2},
    "source": {"files": 1, "sha256": "0"},
    "inputs": {},
}


def write_run(
    path: Path,
    *,
    case: str = "R/R",
    steps: int = 2,
    flips: Collection[tuple[int, int]] = (),
    seal: bool = True,
    top_k: int = 0,
) -> dict[str, Any]:
    """Writes a run of `steps` steps and returns its summary (empty when not sealed).

    `flips` names (step, sample) pairs whose first trainer value gets its lowest bit flipped. With `top_k` each token
    has a support of so many ids.
    """
    run = RunDirectory.create(path)
    record = Recorder(run)
    record.add(
        RunStarted(
            schema=SCHEMA,
            contract=CONTRACT.digest(),
            case=dict.fromkeys(MODULES, case),
            steps=steps,
            samples_per_step=PROMPTS * SAMPLES,
            rollout_engines=1,
            trainer_ranks=1,
        )
    )
    version = WeightVersion(0, "w0")
    record.published(version, CONTRACT.digest(), 5, 1, 0.25)
    _evaluated(record, 0)
    for step in range(1, steps + 1):
        _write_step(record, step, version, case, {sample for at, sample in flips if at == step}, top_k)
        version = WeightVersion(step, f"w{step}")
        record.published(version, CONTRACT.digest(), 5, 1, 0.25)
        tokens = sum(_length(i) for i in range(PROMPTS * SAMPLES))
        seconds = {"generate": 0.5, "reward": 0.01, "train": 1.0, "compare": 0.01, "publish": 0.25}
        record.add(Timed(step=step, generated_tokens=tokens, seconds=seconds))
    _evaluated(record, steps)
    if not seal:
        record.close()
        return {}
    routes = [_route("trainer", case), _route("rollout", case)]
    return record.seal(steps, routes, _manifest(case, steps, top_k))


def _write_step(record: Recorder, step: int, version: WeightVersion, case: str, flipped: set[int], top_k: int) -> None:
    strict = case.endswith("/R")
    rollouts, samples = [], []
    for row in range(PROMPTS * SAMPLES):
        prompt, sample = divmod(row, SAMPLES)
        bits = tuple(_bits(-0.1 * (row + 1) - 0.01 * at - step) for at in range(_length(row)))
        rollout = Rollout(
            key=SampleKey(step, prompt, sample),
            prompt_ids=(5, 6, 7),
            token_ids=tuple(range(10, 10 + _length(row))),
            logp_bits=bits,
            version=version,
            contract=CONTRACT.digest() if strict else "",
            finish_reason="stop",
            engine=0,
            support=Support.of([range(at, at + top_k) for at in range(10, 10 + _length(row))]) if top_k else None,
        )
        trainer = (bits[0] ^ 1, *bits[1:]) if row in flipped else bits
        reward, advantage = float(sample == 0), 1.5 if sample == 0 else -0.75
        rollouts.append((rollout, reward, advantage))
        samples.append(
            StepSample(
                key=str(rollout.key),
                prompt_ids=rollout.prompt_ids,
                token_ids=rollout.token_ids,
                rollout_bits=bits,
                trainer_bits=trainer,
                versions=(version.counter,) * len(bits),
                reward=reward,
                advantage=advantage,
                support=rollout.support,
            )
        )
    record.sampled(*(list(column) for column in zip(*rollouts, strict=True)))
    record.add(
        Trained(
            step=step,
            version=version.counter,
            loss=0.5 / step,
            policy_loss=0.4 / step,
            kl=0.01 * step,
            grad_norm=1.0 + 1.0 / step,
            clip_fraction=0.0,
            ratio_mean=1.0,
            tokens=sum(len(sample.token_ids) for sample in samples),
            seconds={"forward": 0.4, "backward": 0.5, "optimizer": 0.1},
        )
    )
    record.compared(step, version.counter, samples, CLIP)


def _length(row: int) -> int:
    return 2 + row % 3


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _evaluated(record: Recorder, step: int) -> None:
    accuracy = 0.5 + 0.25 * (step > 0)
    record.add(Evaluated(step=step, version=step, samples=4, accuracy=accuracy, mean_response_length=3.0, seconds=0.5))


def _route(role: str, case: str) -> dict[str, Any]:
    route = case.split("/")[POSITION[role]]
    code = "samebits.into_vllm.layers.Routed" if route == "R" else "vllm.model_executor.layers.linear.Linear"
    return {
        "role": role,
        "engine": 0,
        "rank": 0,
        "mode": "eager",
        "contract": CONTRACT.digest() if route == "R" else "",
        "contract_content": CONTRACT.as_data() if route == "R" else {},
        "modules": {f"{group}.first": _module(group, route, code) for group in MODULES},
        "counters": {"linear": 12 if route == "R" else 0},
        "kernels": "ab" * 32,
    }


def _module(group: str, route: str, code: str) -> dict[str, Any]:
    return {"group": group, "boundary": "linear", "route": route, "implementation": code, "calls": 4}


def _manifest(case: str, steps: int, top_k: int) -> dict[str, Any]:
    return {
        "schema": MANIFEST_SCHEMA,
        "config": {
            "case": case,
            "clip_ratio": CLIP,
            "num_rollout": steps,
            "global_batch_size": PROMPTS * SAMPLES,
            "rollout_engines": 1,
            "rollout_tp": 1,
            "temperature": 1.0,
            "top_k": top_k,
        },
        "contract": {"digest": CONTRACT.digest(), "content": CONTRACT.as_data()},
        **_WATCHED,
        "after": _WATCHED,
    }
