"""One trainer rank: Megatron-Core's model, data-parallel wrapper and optimizer, driven a step at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from samebits import _cpu
from samebits.bits import digest
from samebits.collectives import gather_states
from samebits.into_megatron import cpu_stand_ins, layout
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.gpt import ScoringModel, count_calls
from samebits.into_megatron.loss import token_terms
from samebits.into_megatron.model import ModelShape, read_shape, transformer_config
from samebits.into_megatron.ordered import clip_gradients, gradient_norm, ordered_sum
from samebits.into_megatron.parallel import start_groups, stop_groups
from samebits.into_megatron.proof import route_record
from samebits.into_megatron.sampling import check_sampling
from samebits.into_megatron.spec import block_spec
from samebits.into_megatron.weights import from_megatron, load_parameters, save_tensors
from samebits.linear_logp import LinearLogp, ProviderSettings, TokenLayout
from samebits.timeline.types import SampleKey, StepResult, TrainSample

# What a step reports about each active token, in this order.
_REPORTED = ("logp", "policy", "kl", "ratio", "clipped")


class TrainerRank:
    """Lives in a process of its own. All ranks of a trainer must call the same methods in the same order."""

    def __init__(self, config: TrainerConfig, rank: int) -> None:
        """Load policy and reference, and join the other ranks.

        Raises ValueError when the model is missing, not served, or does not divide over the ranks.
        """
        self.config = config
        self.rank = rank
        self.shape = read_shape(config.model)
        self.shape.check_parallel(config.tp, config.max_tp)
        _cpu.set_threads(config.threads)
        # Two pools of threads on the same cores wait for each other. Where every heavy operator is ours, torch is
        # left with small ones: measured on 2 busy cores, its own threads made an R step several times slower.
        torch.set_num_threads(1 if config.case.all_strict else config.threads)
        if cpu_stand_ins.needed():
            for patch in cpu_stand_ins.RESIDENT:
                patch.apply()
        start_groups(config, rank)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.cp_group = parallel_state.get_context_parallel_group()
        self.scorer = LinearLogp(_provider_settings(config), dist.group.WORLD)
        policy = self._build(config.model, self.shape)
        self.reference = self._build_reference()
        self.calls = count_calls(policy)
        self.policy = DistributedDataParallel(
            policy.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            policy,
        )
        self.optimizer = self._build_optimizer()

    def _build(self, path: str, shape: ModelShape) -> ScoringModel:
        config = self.config
        megatron = transformer_config(
            shape,
            tp=config.tp,
            cp=config.cp,
            sequence_parallel=config.sequence_parallel,
            strict_ffn=config.case.ffn == "R",
        )
        spec = block_spec(shape, config.case, config.max_tp)
        rows = TokenLayout(config.cp, self.cp_group.rank(), "zigzag" if config.cp > 1 else "single")
        model = ScoringModel(
            shape, config.case, config.temperature, self.scorer, layout=rows, config=megatron, spec=spec
        )
        model = model.bfloat16()
        load_parameters(model, path, shape, self.tp_group.rank(), self.tp_group.size())
        if shape.tied:
            # Two backward passes reach the one weight, and either may bypass autograd: Megatron must add both.
            model.embedding.word_embeddings.weight.zero_out_wgrad = True
        return model

    def _build_reference(self) -> ScoringModel | None:
        if self.config.reference is None or self.config.kl_coef == 0.0:
            return None
        shape = read_shape(self.config.reference)
        if shape.vocab != self.shape.vocab:
            raise ValueError(
                f"{self.config.reference}: vocabulary of {shape.vocab}, but the policy has {self.shape.vocab}"
            )
        shape.check_parallel(self.config.tp, self.config.max_tp)
        return self._build(self.config.reference, shape).requires_grad_(False)

    def _build_optimizer(self) -> Any:
        config = self.config
        with cpu_stand_ins.while_building_the_optimizer():
            chained = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=config.lr,
                    adam_beta1=config.adam_betas[0],
                    adam_beta2=config.adam_betas[1],
                    adam_eps=config.adam_eps,
                    weight_decay=config.weight_decay,
                    bf16=True,
                    params_dtype=torch.bfloat16,
                    clip_grad=0.0,
                ),
                [self.policy],
                use_gloo_process_groups=False,
            )
        (optimizer,) = chained.chained_optimizers
        for group in optimizer.param_groups:
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        return optimizer

    def train_step(self, step: int, samples: Sequence[TrainSample]) -> StepResult:
        """One optimizer step on the whole batch; the result holds this forward's own log-probabilities.

        The loss is the mean over all active tokens of the batch, however it is cut into micro-batches.
        """
        self._check(samples)
        self._check_identities(samples)
        started = time.perf_counter()
        seconds = {"reference": 0.0, "forward": 0.0, "backward": 0.0}
        slots = layout.first_slots(samples)
        rollout_logp, advantage = _token_inputs(samples)
        reported = torch.zeros(slots[-1], len(_REPORTED), dtype=torch.float32)
        self.policy.zero_grad_buffer()
        self.optimizer.zero_grad()
        for batch in self._micro_batches(samples, slots):
            mark = time.perf_counter()
            reference = self._score(self.reference, batch) if self.reference is not None else None
            mark = _lap(seconds, "reference", mark)
            logp = self.policy(batch)
            terms = token_terms(
                logp,
                rollout_logp[batch.slots],
                advantage[batch.slots],
                reference,
                clip_low=self.config.clip_low,
                clip_high=self.config.clip_high,
                kl_coef=self.config.kl_coef,
            )
            mark = _lap(seconds, "forward", mark)
            terms.loss.backward(torch.full_like(terms.loss, 1.0 / slots[-1]))
            _lap(seconds, "backward", mark)
            columns = (logp.detach(), terms.policy, terms.kl, terms.ratio, terms.clipped)
            reported[batch.slots] = torch.stack(columns, dim=1)
        mark = time.perf_counter()
        norm = self._update()
        _lap(seconds, "optimizer", mark)
        reported = self._from_owners(samples, reported)
        seconds["total"] = time.perf_counter() - started
        return self._result(step, samples, reported, norm, seconds)

    def _check(self, samples: Sequence[TrainSample]) -> None:
        """Raise ValueError naming the first sample that the model cannot score."""
        for sample in samples:
            length = len(sample.token_ids)
            if not 1 <= sample.prompt_length <= length <= self.shape.max_positions:
                raise ValueError(
                    f"sample {sample.key}: prompt of {sample.prompt_length} in a sequence of {length} tokens; "
                    f"want a prompt of at least 1 token and at most {self.shape.max_positions} tokens in all"
                )
            if min(sample.token_ids) < 0 or max(sample.token_ids) >= self.shape.vocab:
                raise ValueError(f"sample {sample.key}: token ids must be in [0, {self.shape.vocab})")
            check_sampling(sample, self.shape.vocab, native=self.config.case.logp == "P")

    def _check_identities(self, samples: Sequence[TrainSample]) -> None:
        """Raise ValueError naming the first sample that was scored under another contract than this run's."""
        wanted = self.config.rollout_contract
        for sample in samples:
            if sample.rollout_contract != wanted:
                raise ValueError(
                    f"sample {sample.key}: scored under run contract {sample.rollout_contract[:12] or 'none'}, "
                    f"this run wants {wanted[:12] or 'none'}; equal numbers would prove nothing"
                )

    def _micro_batches(self, samples: Sequence[TrainSample], slots: Sequence[int]) -> list[layout.MicroBatch]:
        config = self.config
        multiple = config.tp if config.sequence_parallel else 1
        sampling = layout.Sampling.of(samples, config.temperature)
        batches = []
        for group in layout.group_samples(samples, config.max_tokens_per_gpu * config.cp):
            members, places = [samples[i] for i in group], [slots[i] for i in group]
            if config.case.attention == "P":
                batches.append(layout.padded_batch(members, places, multiple=multiple))
            else:
                batches.append(
                    layout.packed_batch(members, places, rank=self.cp_group.rank(), ranks=config.cp, multiple=multiple)
                )
        return [sampling.put_into(batch) for batch in batches]

    def _score(self, model: torch.nn.Module, batch: layout.MicroBatch) -> Tensor:
        with torch.no_grad():
            return model(batch)

    def _update(self) -> float:
        """Sum gradients over ranks, clip, and step; returns the norm before clipping."""
        finalize_model_grads([self.policy])
        self.optimizer.prepare_grads()
        grads = self.optimizer.get_main_grads_for_grad_norm()
        norm = gradient_norm(grads, self.tp_group)
        clip_gradients((p.grad for p in self.optimizer.get_parameters()), norm, self.config.grad_clip)
        self.optimizer.step_with_ready_grads()
        return norm

    def _from_owners(self, samples: Sequence[TrainSample], own: Tensor) -> Tensor:
        """Rows of `own` [slots, n] from the context-parallel rank that owns each slot: copies, never sums."""
        if self.config.cp == 1:
            return own
        owner = layout.slot_owner(samples, self.config.cp)
        return gather_states(own, self.cp_group)[owner, torch.arange(own.shape[0])]

    def _result(
        self,
        step: int,
        samples: Sequence[TrainSample],
        reported: Tensor,
        norm: float,
        seconds: dict[str, float],
    ) -> StepResult:
        tokens = reported.shape[0]
        mean = {name: ordered_sum(reported[:, column]) / max(tokens, 1) for column, name in enumerate(_REPORTED)}
        return StepResult(
            step=step,
            logp_bits=_bits_by_sample(samples, reported[:, 0]),
            loss=mean["policy"] + self.config.kl_coef * mean["kl"],
            policy_loss=mean["policy"],
            kl=mean["kl"],
            grad_norm=norm,
            clip_fraction=mean["clipped"],
            ratio_mean=mean["ratio"],
            tokens=tokens,
            seconds=seconds,
        )

    def score(self, samples: Sequence[TrainSample]) -> dict[SampleKey, tuple[int, ...]]:
        """Log-probability bits of every active token under the current weights; nothing is updated."""
        self._check(samples)
        slots = layout.first_slots(samples)
        logp = torch.zeros(slots[-1], 1, dtype=torch.float32)
        for batch in self._micro_batches(samples, slots):
            logp[batch.slots, 0] = self._score(self.policy, batch)
        return _bits_by_sample(samples, self._from_owners(samples, logp)[:, 0])

    def export(self, path: str) -> dict[str, str]:
        """Write the weights under Hugging Face names as `path`/model.safetensors (rank 0), return their digests.

        All ranks must call it. Ranks that hold no whole copy return an empty dict.
        """
        parameters = {name: p.detach() for name, p in self.policy.module.named_parameters()}
        shards: list[dict[str, Tensor]] = [{} for _ in range(self.config.tp)]
        for name, parameter in parameters.items():
            for shard, tensor in zip(shards, gather_states(parameter, self.tp_group), strict=True):
                shard[name] = tensor
        if self.rank != 0:
            return {}
        whole = from_megatron(shards, self.shape)
        save_tensors(whole, Path(path))
        return {name: digest(tensor) for name, tensor in whole.items()}

    def proof(self) -> dict[str, Any]:
        """What this process computed with: routes and calls per boundary, kernel counters, patches in place."""
        patches = cpu_stand_ins.RESIDENT if cpu_stand_ins.needed() else ()
        return route_record(self.config, self.rank, self.calls, patches, self.scorer)

    def close(self) -> None:
        """Leave the process groups and undo the stand-ins."""
        if dist.is_initialized():
            stop_groups()
        if cpu_stand_ins.needed():
            for patch in reversed(cpu_stand_ins.RESIDENT):
                patch.undo()


def _provider_settings(config: TrainerConfig) -> ProviderSettings:
    """Which provider scores: on route P none, unless it is audited there."""
    mode, route = config.linear_logp_provider_mode, config.case.logp
    used = route == "R" or mode == "audit"
    return ProviderSettings(
        path=(config.linear_logp_provider or None) if used else None,
        mode=mode,
        route=route,
        expected_contract=config.linear_logp_contract,
    )


def _token_inputs(samples: Sequence[TrainSample]) -> tuple[Tensor, Tensor]:
    """fp32 [slots] rollout log-probabilities and advantages."""
    bits: list[int] = []
    advantages: list[float] = []
    for sample in samples:
        if len(sample.rollout_logp_bits) != sample.response_length:
            raise ValueError(
                f"sample {sample.key}: {len(sample.rollout_logp_bits)} rollout log-probabilities "
                f"for {sample.response_length} response tokens"
            )
        bits += sample.rollout_logp_bits
        advantages += [sample.advantage] * sample.response_length
    patterns = torch.tensor(bits, dtype=torch.int64).to(torch.uint32)
    return patterns.view(torch.float32), torch.tensor(advantages, dtype=torch.float32)


def _bits_by_sample(samples: Sequence[TrainSample], logp: Tensor) -> dict[SampleKey, tuple[int, ...]]:
    patterns = logp.contiguous().view(torch.uint32).tolist()
    slots = layout.first_slots(samples)
    return {
        sample.key: tuple(patterns[start:end])
        for sample, start, end in zip(samples, slots[:-1], slots[1:], strict=True)
    }


def _lap(seconds: dict[str, float], phase: str, since: float) -> float:
    now = time.perf_counter()
    seconds[phase] = seconds.get(phase, 0.0) + now - since
    return now
