"""One configuration for one run: flags over the TOML file over the defaults, and nothing is dropped."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from samebits.contract.routes import MODULES, Case
from samebits.timeline.types import is_limited, limits_problem

MAX_RESPONSES = 2_000_000  # each takes some 400 bytes of the timeline, of which `samebits verify` reads 1 GiB


class RunConfig(BaseModel):
    """Everything that `samebits run` can be told. A case X/Y is X on the trainer, Y on the rollout side."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    case: Case = Field("R/R", description="trainer/rollout: R is the samebits route, P the native code")
    attention_case: Case | None = Field(None, description="case of the attention module alone")
    ffn_case: Case | None = Field(None, description="case of the feed-forward module alone")
    logp_case: Case | None = Field(None, description="case of the final norm, LM head and log-probability")

    device: Literal["cpu", "cuda"] = Field("cpu", description="cpu or cuda, for both sides; they share the cards")

    run_dir: str | None = Field(None, min_length=1, description="where the records go; if unset, the next runs/NNNN")
    save_model: bool = Field(False, description="keep the trained model in RUN_DIR/model, a Hugging Face directory")
    model: str = Field("preset:arithmetic", description="a Hugging Face directory, or preset:NAME")
    reference_checkpoint: str | None = Field(
        None, min_length=1, description="model of the KL term; if unset, the start"
    )
    prompt_data: str = Field("preset:arithmetic", description="problems, JSONL with prompt and label")
    eval_data: str | None = Field("preset:arithmetic", description="held-out problems, JSONL; an empty string: none")

    reward: str | None = Field(
        None, min_length=1, description="package.module.name of your own f(response, label); if unset, a boxed answer"
    )

    num_rollout: int = Field(15, ge=1, description="steps: each one rollout and one training step")
    samples_per_prompt: int = Field(8, ge=1, description="responses per prompt, one advantage group")
    global_batch_size: int = Field(64, ge=1, description="responses per step, over all prompts")
    max_prompt_length: int = Field(512, ge=1, description="tokens per prompt at most")
    max_response_length: int = Field(64, ge=1, description="tokens per response at most")
    max_tokens_per_gpu: int = Field(
        2048, ge=1, description="tokens of one training micro-batch, per rank; a longer sample is one of its own"
    )
    kl_coef: float = Field(0.001, ge=0, description="weight of the KL term in the loss")
    lr: float = Field(1e-4, gt=0, description="learning rate of the optimiser")
    clip_ratio: float = Field(0.2, gt=0, lt=1, description="PPO clip: the ratio stays in 1 +- this")
    clip_grad: float = Field(1.0, gt=0, description="largest global gradient norm")
    temperature: float = Field(1.0, description="sampling temperature, also of the log-probabilities; not 0")
    top_k: int = Field(0, ge=0, lt=1 << 31, description="draw from the k likeliest tokens; 0: no limit")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens that hold this mass; 1: all")
    min_p: float = Field(0.0, ge=0, le=1, description="leave out tokens below this part of the likeliest; 0: none")
    seed: int = Field(1234, ge=0, lt=1 << 63, description="order of the problems")
    rollout_seed: int = Field(1234, ge=0, lt=1 << 63, description="random draws of the rollout engines")
    eval_interval: int = Field(5, ge=0, description="evaluate every so many steps and at both ends; 0: never")
    eval_prompts: int = Field(100, ge=1, description="held-out problems per evaluation")

    trace_tokens: int = Field(
        0, ge=0, description="response tokens per step, of its first sample, of which every boundary is recorded"
    )

    linear_logp_provider: str = Field(
        "samebits.linear_logp.provider.provider",
        description="who computes the trainer's log-probabilities on route R: a dotted path or a registered name",
    )
    linear_logp_provider_mode: Literal["auto", "strict", "audit"] = Field(
        "strict", description="its refusal ends the run (strict) or means native code (auto); audit compares on route P"
    )

    replay_tokens: str | None = Field(
        None, min_length=1, description="a run whose recorded tokens are produced again instead of drawn: equal work"
    )

    train_tp: int = Field(1, ge=1, description="tensor-parallel ranks of the trainer")
    train_sequence_parallel: bool = Field(False, description="tensor-parallel ranks split rows between linear layers")
    train_cp: int = Field(1, ge=1, description="context-parallel ranks of the trainer")
    train_cp_layout: Literal["zigzag", "allgather"] = Field(
        "zigzag", description="what context-parallel ranks split: each sample (zigzag), or the packed rows (allgather)"
    )
    train_pp: int = Field(1, ge=1, description="pipeline stages of the trainer")
    train_vpp: int = Field(1, ge=1, description="model chunks per pipeline stage, interleaved when more than one")
    train_dp: int = Field(1, ge=1, description="data-parallel ranks of the trainer")
    train_recompute: bool = Field(False, description="layers keep their inputs only and run again for the gradients")
    train_optimizer_offload: float = Field(
        0.0, ge=0, le=1, description="part of Adam's moments in host memory; on a card, bits do not depend on it"
    )
    train_vocab_multiple: int = Field(1, ge=1, description="vocabulary rows of a trainer rank: a multiple of this")
    strict_gradients: bool = Field(False, description="gradients and weights are the same bits in every train layout")
    gradient_segments: int = Field(
        0,
        ge=0,
        description="runs of samples, gradients summed apart, then along a tree; 0: one per train_dp, 8 if strict",
    )
    train_transport: Literal["gloo", "shared_memory", "peer_memory"] = Field(
        "gloo",
        description="what carries collectives of trainer ranks: gloo, shared_memory of a host, peer_memory of GPUs",
    )
    weight_transfer: Literal["files", "cuda_ipc"] = Field(
        "files", description="how new weights reach the engines: as files, or cuda_ipc, read where they lie on a card"
    )
    rollout_engines: int = Field(1, ge=1, description="vLLM engines")
    rollout_tp: int = Field(1, ge=1, description="tensor-parallel workers of each engine")
    rollout_graphs: bool = Field(True, description="on a GPU, engines replay captured graphs on route R")
    kv_cache_gib: float = Field(0.25, gt=0, description="memory of an engine worker for keys and values, in GiB")
    max_num_seqs: int = Field(64, ge=1, description="responses that an engine computes at once; others wait")
    max_num_batched_tokens: int = Field(4096, ge=1, description="tokens of one step of an engine, prompts in pieces")
    native_compile: bool = Field(False, description="native vLLM, compiled: faster per token, slow to start")
    max_tp: int | None = Field(None, ge=1, description="K segments of row-parallel layers; the larger TP if unset")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of one engine or trainer; 0: all that are free")

    tensorboard: bool = Field(False, description="write TensorBoard files into RUN_DIR/tracking")
    wandb: Literal["off", "offline", "online"] = Field(
        "off", description="W&B: off, offline or online; its files go there too"
    )
    wandb_project: str = Field("samebits", description="project name for Weights & Biases")

    start_timeout: float = Field(600.0, gt=0, description="seconds an engine or trainer may take to start")
    step_timeout: float = Field(1800.0, gt=0, description="seconds one call to it may take")

    @model_validator(mode="after")
    def _agree(self) -> RunConfig:
        if self.global_batch_size % self.samples_per_prompt:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of samples_per_prompt "
                f"{self.samples_per_prompt}: groups would be torn"
            )
        responses = self.num_rollout * self.global_batch_size
        if responses > MAX_RESPONSES:
            raise ValueError(
                f"num_rollout {self.num_rollout} steps of {self.global_batch_size} are {responses:,} responses, and "
                f"the records of a run hold {MAX_RESPONSES:,}: make several runs, each but the last with save_model, "
                "each but the first with the model of the one before"
            )
        if self.routes("trainer")["logp"] == "R" and self.linear_logp_provider_mode == "audit":
            raise ValueError(
                "linear_logp_provider_mode audit keeps the native log-probabilities: set logp_case to P/R or P/P"
            )
        if self.routes("trainer")["logp"] == "R" and not self.linear_logp_provider.strip():
            raise ValueError("linear_logp_provider is empty, but route R needs one: name it, or set logp_case to P/P")
        self._check_sampling()
        self._check_tree()
        if self.native_compile and set(self.routes("rollout").values()) != {"P"}:
            raise ValueError("native_compile is for a native rollout side: set case to P/P (or R/P), or leave it out")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "every response takes a token in each step; raise the one or lower the other"
            )
        if self.weight_transfer == "cuda_ipc" and self.device != "cuda":
            raise ValueError("weight_transfer cuda_ipc needs both sides on GPUs: set device to cuda, or use files")
        if self.train_optimizer_offload and self.device != "cuda":
            raise ValueError("train_optimizer_offload takes moments off a card: set device to cuda, or leave it out")
        if self.rollout_engines > self.global_batch_size:
            raise ValueError(
                f"rollout_engines {self.rollout_engines} exceeds the {self.global_batch_size} samples per step; "
                f"use at most {self.global_batch_size}, or raise global_batch_size"
            )
        return self

    def _check_sampling(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"temperature must be positive, got {self.temperature}: a greedy token is certain, its log-probability "
                "0 whatever the weights, so there is nothing to learn and nothing to compare"
            )
        if self.temperature < 0.01:
            raise ValueError(f"temperature {self.temperature} is below 0.01, the lowest that vLLM serves: raise it")
        if self.temperature > 2:
            raise ValueError(f"temperature {self.temperature} is above 2, the highest that vLLM serves: lower it")
        problem = limits_problem(self.top_k, self.top_p, self.min_p)
        if problem:
            raise ValueError(problem)
        if self.limited and any(self.routes(side)["logp"] == "P" for side in ("trainer", "rollout")):
            raise ValueError(
                "top_k, top_p and min_p need logp_case R/R: native vLLM does not say which tokens it kept, and native "
                "Megatron-Core does not renormalise over them"
            )
        if self.limited and self.strict_gradients:
            raise ValueError(
                "strict_gradients does not cover gradients over the tokens that top_k, top_p or min_p kept: "
                "leave the limits or the option out"
            )

    @property
    def limited(self) -> bool:
        """Whether every token comes with the ids that it was drawn from."""
        return is_limited(self.top_k, self.top_p, self.min_p)

    def _check_tree(self) -> None:
        """Tensor-parallel ranks finish one balanced tree over the K segments, each with whole ones."""
        for name in ("train_tp", "rollout_tp", "max_tp"):
            size = getattr(self, name) or 1
            if size & (size - 1):
                below = 1 << size.bit_length() - 1
                raise ValueError(
                    f"{name} {size} is not a power of two: the tree over ranks must be balanced; "
                    f"the nearest that work: {below} and {2 * below}"
                )
        for name in ("train_tp", "rollout_tp"):
            if self.segments % getattr(self, name):
                raise ValueError(
                    f"max_tp {self.segments} is not a multiple of {name} {getattr(self, name)}: a rank must hold "
                    f"whole K segments; leave max_tp out, or set it to at least {getattr(self, name)}"
                )

    @property
    def prompts_per_step(self) -> int:
        return self.global_batch_size // self.samples_per_prompt

    @property
    def segments(self) -> int:
        """K segments of row-parallel layers: both sides cut K alike, whatever their own TP."""
        return self.max_tp or max(self.train_tp, self.rollout_tp)

    @property
    def trainer_ranks(self) -> int:
        return self.train_tp * self.train_cp * self.train_pp * self.train_dp

    @property
    def cases(self) -> dict[str, str]:
        """The case of each module: attention, ffn, logp."""
        return {module: getattr(self, f"{module}_case") or self.case for module in MODULES}

    def routes(self, side: Literal["trainer", "rollout"]) -> dict[str, str]:
        """R or P of each module on one side."""
        position = 0 if side == "trainer" else 1
        return {module: case.split("/")[position] for module, case in self.cases.items()}


def load_config(flags: Mapping[str, Any], file: Path | None = None) -> RunConfig:
    """Resolves flags over file over defaults. ValueError names the key and the nearest valid one."""
    settings = _read_toml(file) if file is not None else {}
    for key in (*settings, *flags):
        if key not in RunConfig.model_fields:
            raise ValueError(f"unknown key {key!r}{_nearest(key)}")
    try:
        return RunConfig(**{**settings, **flags})
    except ValidationError as error:
        raise ValueError(_explain(error)) from error


def to_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML that `--config` reads back, each key explained. Unset keys are comments."""
    lines = []
    for key, field in type(config).model_fields.items():
        value = getattr(config, key)
        line = f"# {key}" if value is None else f"{key} = {_toml_value(value)}"
        lines.append(f"{line:<40}  # {field.description}")
    return "\n".join(lines) + "\n"


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the configuration {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid TOML: {error}") from error
    named = {key.replace("-", "_"): value for key, value in settings.items()}
    if len(named) < len(settings):
        twice = next(key for key in settings if "-" in key and key.replace("-", "_") in settings)
        raise ValueError(f"{file} sets {twice.replace('-', '_')} twice, with a dash and without: keep one")
    return named


def _nearest(key: str) -> str:
    """Which key was meant: one spelt alike, or one whose explanation begins like this (`learning_rate`: lr)."""
    words = re.escape(key.replace("_", " ")) + r"\b"
    explained = [name for name, field in RunConfig.model_fields.items() if re.match(words, str(field.description))]
    close = explained or difflib.get_close_matches(key, RunConfig.model_fields, n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(RunConfig.model_fields)}"


def _explain(error: ValidationError) -> str:
    problems = []
    for problem in error.errors():
        if not problem["loc"]:
            problems.append(str(problem["ctx"]["error"]) if "ctx" in problem else problem["msg"])
            continue
        key = str(problem["loc"][0])
        text = f"{key}: {problem['msg']}, got {problem['input']!r}"
        if key == "case" or key.endswith("_case"):
            close = difflib.get_close_matches(str(problem["input"]).upper(), get_args(Case), n=1, cutoff=0.6)
            text += f"; did you mean {close[0]!r}?" if close else ""
        problems.append(text)
    return "; ".join(problems)


def _toml_value(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _toml_string(value)
    return repr(value)


def _toml_string(text: str) -> str:
    """A TOML basic string: quotes, backslashes and control characters escaped."""
    escapes = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(escapes.get(c, c if c.isprintable() else f"\\U{ord(c):08X}") for c in text) + '"'
