"""The loop. One step: prompts, rollout, reward, advantage, train step, compare, publish; each put on record.

The comparison has two independent sources: the bits that the rollout engine reported while it sampled, and
the bits that the trainer computed in its own forward before the update. They meet only here.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from samebits.contract import RunContract
from samebits.evidence.record import Recorder
from samebits.evidence.sidecar import StepSample
from samebits.rl import step_trace
from samebits.rl.advantage import group_advantages
from samebits.rl.checks import check_contracts, check_result, check_rollouts
from samebits.rl.config import RunConfig
from samebits.rl.protocols import RolloutSide, TrainerSide
from samebits.rl.publication import check_publication, version_of
from samebits.rl.recorded import RecordedTokens
from samebits.timeline.events import SCHEMA as TIMELINE_SCHEMA
from samebits.timeline.events import Evaluated, RunStarted, Timed, Trained
from samebits.timeline.types import (
    GenerateRequest,
    Prompt,
    Rollout,
    SampleKey,
    StepResult,
    TrainSample,
    WeightVersion,
)


class PromptSource(Protocol):
    """Where problems come from: the same arguments give the same problems."""

    def batch(self, step: int, count: int, seed: int) -> tuple[Prompt, ...]:
        """`count` prompts for one step."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the loop works with."""

    config: RunConfig
    prompts: PromptSource
    held_out: PromptSource | None
    reward: Callable[[str, str], float]
    decode: Callable[[Sequence[int]], str]
    stop_ids: tuple[int, ...]
    rollout: RolloutSide
    trainer: TrainerSide
    contract: RunContract
    weights: Path
    recorded: RecordedTokens | None = None


def run_loop(job: Job, record: Recorder) -> WeightVersion:
    """All steps of one run; the version of the weights that they end with.

    RunFailed: something cannot be trusted; OSError: it cannot be recorded.
    """
    config = job.config
    _start(job, record)
    version = publish(job, record, 0)
    evaluate(job, record, 0, version)
    for step in range(1, config.num_rollout + 1):
        clock = Clock()
        with clock.phase("generate"):
            prompts = job.prompts.batch(step, config.prompts_per_step, config.seed)
            requests = training_requests(job, step, prompts)
            if config.trace_tokens:
                step_trace.watch(job.rollout, job.trainer, requests, config.trace_tokens)
            rollouts = generate(job, requests, version)
        with clock.phase("reward"):
            rewards = score(job, rollouts, prompts)
            advantages = normalise(rewards, config.samples_per_prompt)
            record.sampled(rollouts, rewards, advantages)
        with clock.phase("train"):
            result = train_step(job, step, rollouts, advantages)
        with clock.phase("compare"):
            record.add(trained(result, version))
            samples = step_samples(rollouts, result, rewards, advantages)
            record.compared(step, version.counter, samples, config.clip_ratio)
            if config.trace_tokens:
                step_trace.keep(job.rollout, job.trainer, record, step)
        with clock.phase("publish"):
            version = publish(job, record, step)
        tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        record.add(Timed(step=step, generated_tokens=tokens, seconds=clock.seconds))
        if is_evaluation_due(config, step):
            evaluate(job, record, step, version)
    return version


def _start(job: Job, record: Recorder) -> None:
    config = job.config
    record.add(
        RunStarted(
            schema=TIMELINE_SCHEMA,
            contract=job.contract.digest(),
            case=config.cases,
            steps=config.num_rollout,
            samples_per_step=config.global_batch_size,
            rollout_engines=config.rollout_engines,
            trainer_ranks=config.trainer_ranks,
        )
    )


def training_requests(job: Job, step: int, prompts: Sequence[Prompt]) -> list[GenerateRequest]:
    """`samples_per_prompt` requests for each prompt, group after group; with their tokens where they are recorded."""
    requests = [
        _request(job, SampleKey(step, prompt.index, sample), prompt)
        for prompt in prompts
        for sample in range(job.config.samples_per_prompt)
    ]
    return requests if job.recorded is None else job.recorded.forced(step, requests)


def _request(job: Job, key: SampleKey, prompt: Prompt) -> GenerateRequest:
    return GenerateRequest(
        key=key,
        prompt_ids=prompt.token_ids,
        seed=draw_seed(job.config.rollout_seed, key),
        max_tokens=job.config.max_response_length,
        temperature=job.config.temperature,
        stop_ids=job.stop_ids,
        top_k=job.config.top_k,
        top_p=job.config.top_p,
        min_p=job.config.min_p,
    )


def draw_seed(rollout_seed: int, key: SampleKey) -> int:
    """The seed of one sample's random draws: 63 bits that depend on its name alone."""
    return int.from_bytes(hashlib.sha256(f"{rollout_seed}/{key}".encode()).digest()[:8], "big") >> 1


def generate(job: Job, requests: Sequence[GenerateRequest], version: WeightVersion) -> list[Rollout]:
    """One checked response per request, in order."""
    rollouts = job.rollout.generate(requests)
    strict = "R" in job.config.routes("rollout").values()
    check_rollouts(requests, rollouts, version, job.contract.digest() if strict else "")
    return rollouts


def score(job: Job, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[float]:
    """The reward of each response against its prompt's label."""
    labels = {prompt.index: prompt.label for prompt in prompts}
    return [float(job.reward(job.decode(r.token_ids), labels[r.key.prompt])) for r in rollouts]


def normalise(rewards: Sequence[float], group: int) -> list[float]:
    """Group advantages of consecutive groups of rewards."""
    return [
        advantage
        for start in range(0, len(rewards), group)
        for advantage in group_advantages(rewards[start : start + group])
    ]


def train_step(job: Job, step: int, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> StepResult:
    """Hands the samples to the trainer and checks that it answered for exactly these."""
    samples = [
        TrainSample(
            key=rollout.key,
            token_ids=(*rollout.prompt_ids, *rollout.token_ids),
            prompt_length=len(rollout.prompt_ids),
            advantage=advantage,
            rollout_logp_bits=rollout.logp_bits,
            rollout_contract=rollout.contract,
            support=rollout.support,
        )
        for rollout, advantage in zip(rollouts, advantages, strict=True)
    ]
    result = job.trainer.train_step(step, samples)
    check_result(step, samples, result)
    return result


def trained(result: StepResult, version: WeightVersion) -> Trained:
    """The ledger's line about one training step."""
    return Trained(
        step=result.step,
        version=version.counter,
        loss=result.loss,
        policy_loss=result.policy_loss,
        kl=result.kl,
        grad_norm=result.grad_norm,
        clip_fraction=result.clip_fraction,
        ratio_mean=result.ratio_mean,
        tokens=result.tokens,
        seconds=result.seconds,
    )


def step_samples(
    rollouts: Sequence[Rollout], result: StepResult, rewards: Sequence[float], advantages: Sequence[float]
) -> list[StepSample]:
    """Both sides' bits of each sample, brought together by the sample's name."""
    return [
        StepSample(
            key=str(rollout.key),
            prompt_ids=rollout.prompt_ids,
            token_ids=rollout.token_ids,
            rollout_bits=rollout.logp_bits,
            trainer_bits=result.logp_bits[rollout.key],
            versions=(rollout.version.counter,) * len(rollout.token_ids),
            reward=reward,
            advantage=advantage,
            support=rollout.support,
        )
        for rollout, reward, advantage in zip(rollouts, rewards, advantages, strict=True)
    ]


def publish(job: Job, record: Recorder, counter: int) -> WeightVersion:
    """Exports the trainer's weights, loads them into every engine and checks what each one then holds.

    Before that, every process shows by which contract it computes: version 0 is published before the first step.
    """
    began = time.monotonic()
    check_contracts([*job.trainer.proof(), *job.rollout.proof()], job.config.cases, job.contract)
    path = job.weights / f"v{counter:06d}"
    path.mkdir(parents=True)
    digests = job.trainer.export(str(path))
    version = version_of(counter, digests)
    held = job.rollout.publish(str(path), version)
    check_publication(path, digests, held, job.trainer.lent_digests)
    shutil.rmtree(path)
    record.published(version, job.contract.digest(), len(digests), len(held), time.monotonic() - began)
    return version


def is_evaluation_due(config: RunConfig, step: int) -> bool:
    """Every `eval_interval` steps and after the last one."""
    return config.eval_interval > 0 and (step % config.eval_interval == 0 or step == config.num_rollout)


def evaluate(job: Job, record: Recorder, step: int, version: WeightVersion) -> None:
    """Accuracy on held-out problems, sampled like a rollout. Sample number -1 keeps its keys apart."""
    if job.held_out is None:
        return
    began = time.monotonic()
    prompts = job.held_out.batch(0, job.config.eval_prompts, 0)
    requests = [_request(job, SampleKey(step, prompt.index, -1), prompt) for prompt in prompts]
    rollouts = generate(job, requests, version)
    rewards = score(job, rollouts, prompts)
    record.add(
        Evaluated(
            step=step,
            version=version.counter,
            samples=len(rollouts),
            accuracy=sum(reward > 0 for reward in rewards) / len(rewards),
            mean_response_length=sum(len(r.token_ids) for r in rollouts) / len(rollouts),
            seconds=time.monotonic() - began,
        )
    )


@dataclass
class Clock:
    """Seconds of one step by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
