"""One trainer rank: Megatron-Core's model, data-parallel wrapper and optimizer, driven a step at a time."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from samebits.bits import part_digests, tree_digests
from samebits.collectives import shared_fate
from samebits.collectives.lending import lend
from samebits.into_megatron import cpu_stand_ins, layout
from samebits.into_megatron.batches import micro_batches
from samebits.into_megatron.building import build_chunks, build_optimizer, build_scorer, served_shape, wrap
from samebits.into_megatron.config import TrainerConfig
from samebits.into_megatron.device import rank_device, set_up_device, set_up_random_states
from samebits.into_megatron.gpt import ScoringModel, count_calls
from samebits.into_megatron.gradients import finalize
from samebits.into_megatron.loss import token_terms
from samebits.into_megatron.ordered import clip_gradients, exact_norm, gradient_norm, ordered_sum
from samebits.into_megatron.parallel import gather_parameters, start_groups, stop_groups
from samebits.into_megatron.proof import CallCounts, route_record
from samebits.into_megatron.results import TokenTable, bits_by_sample
from samebits.into_megatron.sampling import check_sampling
from samebits.into_megatron.schedule import run_schedule
from samebits.into_megatron.token_rows import placements
from samebits.into_megatron.tracing import RankTrace
from samebits.into_megatron.weights import save_tensors
from samebits.patching import Patch
from samebits.timeline.types import Part, SampleKey, StepResult, TrainSample
from samebits.trace import Entry, Point

# What a step reports about each active token, in this order.
_REPORTED = ("logp", "policy", "kl", "ratio", "clipped")


class TrainerRank:
    """Lives in a process of its own. All ranks of a trainer must call the same methods in the same order."""

    def __init__(self, config: TrainerConfig, rank: int) -> None:
        """Load policy and reference, and join the other ranks.

        Raises ValueError when the model is missing, not served, or does not divide over the ranks, and where there
        is no such device.
        """
        self.config = config
        self.rank = rank
        self.device = rank_device(config, rank)
        self.shape = served_shape(config.model, config)
        self._watched: dict[int, int] = {}
        self._entries: list[Entry] = []
        self._lent: dict[str, Tensor] = {}
        self._stand_ins = cpu_stand_ins.resident(config.device)
        self._applied: list[Patch] = []
        with ExitStack() as on_failure:
            if config.device == "cpu":  # on a card the end of a group may wait for its peers
                on_failure.callback(self.close)
            self._build()
            on_failure.pop_all()

    def _build(self) -> None:
        config = self.config
        for patch in self._stand_ins:
            patch.apply()
            self._applied.append(patch)
        set_up_device(config, self.device)
        start_groups(config, self.rank)
        set_up_random_states(config)
        self.scorer = build_scorer(config)
        models = build_chunks(config.model, self.shape, config, self.scorer)
        self.reference = self._build_reference()
        self.calls = CallCounts()
        for model in models:
            count_calls(model, self.calls)
        self.policy = [wrap(model, config, first=index == 0) for index, model in enumerate(models)]
        for model in models:
            model.config.finalize_model_grads_func = finalize
        self.optimizer = build_optimizer(config, list(self.policy))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters under the names that they have in the whole model."""
        for chunk in self.policy:
            for name, parameter in chunk.module.named_parameters():
                yield chunk.module.whole_name(name), parameter

    def _build_reference(self) -> list[ScoringModel]:
        """The chunks of the reference model; none where there is no KL term."""
        if self.config.reference is None or self.config.kl_coef == 0.0:
            return []
        shape = served_shape(self.config.reference, self.config)
        if shape.vocab != self.shape.vocab:
            raise ValueError(
                f"{self.config.reference}: vocabulary of {shape.vocab}, but the policy has {self.shape.vocab}"
            )
        chunks = build_chunks(self.config.reference, shape, self.config, self.scorer)
        return [chunk.requires_grad_(False) for chunk in chunks]

    @shared_fate()
    def train_step(self, step: int, samples: Sequence[TrainSample]) -> StepResult:
        """One optimizer step on the whole batch; the result holds this forward's own log-probabilities.

        The loss is the mean over all active tokens of the batch, however it is cut into micro-batches and ranks.
        """
        self._lent.clear()
        self._check(samples)
        self._check_identities(samples)
        started = time.perf_counter()
        batches = self._micro_batches(samples)
        rollout_logp, advantage = (values.to(self.device) for values in _token_inputs(samples))
        tokens = rollout_logp.shape[0]
        if not tokens:
            raise ValueError("no sample has a response token: there is nothing to learn from")
        reference = self._reference_scores(samples, batches) if self.reference else None
        seconds = {"reference": time.perf_counter() - started}
        table = TokenTable(samples, len(_REPORTED), self.device)
        for chunk in self.policy:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss(batch: layout.MicroBatch, logp: Tensor) -> Tensor:
            terms = token_terms(
                logp,
                rollout_logp[batch.slots],
                advantage[batch.slots],
                None if reference is None else reference[batch.slots],
                clip_low=self.config.clip_low,
                clip_high=self.config.clip_high,
                kl_coef=self.config.kl_coef,
            )
            columns = (logp.detach(), terms.policy, terms.kl, terms.ratio, terms.clipped)
            table.fill(batch.slots, torch.stack(columns, dim=1))
            return terms.loss

        mark = self._time()
        with self._watching(samples, batches):
            seconds["forward"] = run_schedule(self.policy, batches, loss, scale=1.0 / tokens)
        seconds["backward"] = self._time() - mark - seconds["forward"]
        # Before the update: a batch that was not scored whole must not move a weight.
        reported = self._collect(table)
        mark = self._time()
        norm = self._update()
        seconds["optimizer"] = self._time() - mark
        seconds["total"] = self._time() - started
        return self._result(step, samples, reported, norm, seconds)

    def _time(self) -> float:
        """Seconds of the clock once the device has done everything that it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

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

    def _micro_batches(self, samples: Sequence[TrainSample]) -> list[layout.MicroBatch]:
        data, context = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
        return [batch.to(self.device) for batch in micro_batches(samples, self.config, data, context)]

    def _scores(
        self, chunks: Sequence[torch.nn.Module], samples: Sequence[TrainSample], batches: Sequence[layout.MicroBatch]
    ) -> TokenTable:
        """Log-probabilities under the weights of `chunks`, of the tokens that this rank scores."""
        table = TokenTable(samples, 1, self.device)

        def keep(batch: layout.MicroBatch, logp: Tensor) -> Tensor:
            table.fill(batch.slots, logp[:, None])
            return logp

        with torch.no_grad():
            run_schedule(chunks, batches, keep, forward_only=True)
        return table

    def _reference_scores(self, samples: Sequence[TrainSample], batches: Sequence[layout.MicroBatch]) -> Tensor:
        """fp32 [slots], under the reference model's weights."""
        return self._collect(self._scores(self.reference, samples, batches))[:, 0].to(self.device)

    def _collect(self, table: TokenTable) -> Tensor:
        return table.collect(
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_pipeline_model_parallel_group(),
        )

    def _update(self) -> float:
        """Clip the summed gradients and step; returns the norm before clipping."""
        self.optimizer.prepare_grads()
        grads = self.optimizer.get_main_grads_for_grad_norm()
        norm_of = exact_norm if self.config.strict_gradients else gradient_norm
        norm = norm_of(grads, parallel_state.get_model_parallel_group())
        clip_gradients((p.grad for p in self.optimizer.get_parameters()), norm, self.config.grad_clip)
        self.optimizer.step_with_ready_grads()
        return norm

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
            logp_bits=bits_by_sample(samples, reported[:, 0]),
            loss=mean["policy"] + self.config.kl_coef * mean["kl"],
            policy_loss=mean["policy"],
            kl=mean["kl"],
            grad_norm=norm,
            clip_fraction=mean["clipped"],
            ratio_mean=mean["ratio"],
            tokens=tokens,
            seconds=seconds,
        )

    @shared_fate()
    def score(self, samples: Sequence[TrainSample]) -> dict[SampleKey, tuple[int, ...]]:
        """Log-probability bits of every active token under the current weights; nothing is updated."""
        self._check(samples)
        table = self._scores(self.policy, samples, self._micro_batches(samples))
        return bits_by_sample(samples, self._collect(table)[:, 0])

    @shared_fate()
    def trace(
        self, samples: Sequence[TrainSample], traced: Mapping[int, int], keep: Collection[tuple[int, str]] = ()
    ) -> tuple[list[Entry], dict[str, Any]]:
        """Scores the samples as `score` does and records points of some of them.

        `traced` maps the number of a sample to its last index of interest, `keep` are points whose rows are wanted
        whole. Returns what this rank recorded and the facts of its sites.
        """
        self._check(samples)
        batches = self._micro_batches(samples)
        with closing(self._tracing(samples, batches, traced, keep)) as tracing:
            self._scores(self.policy, samples, batches)
        return tracing.take(), tracing.facts()

    def watch(self, traced: Mapping[int, int]) -> None:
        """Record points of the samples of the next training step, by number, up to the index given for each."""
        self._watched, self._entries = dict(traced), []

    def watched(self) -> list[Entry]:
        """Stop recording; what this rank recorded."""
        self._watched = {}
        return self._entries

    @contextmanager
    def _watching(self, samples: Sequence[TrainSample], batches: Sequence[layout.MicroBatch]) -> Iterator[None]:
        if not self._watched:
            yield
            return
        with closing(self._tracing(samples, batches, self._watched, ())) as tracing:
            yield
        self._entries = tracing.take()

    def _tracing(
        self,
        samples: Sequence[TrainSample],
        batches: Sequence[layout.MicroBatch],
        traced: Mapping[int, int],
        keep: Collection[tuple[int, str]],
    ) -> RankTrace:
        data, context = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
        places = placements(samples, self.config, data, context)
        models = [chunk.module for chunk in self.policy]
        return RankTrace(models, traced, [Point(*point) for point in keep], batches, places)

    @shared_fate()
    def export(self, path: str) -> dict[str, str]:
        """Write the weights under Hugging Face names as `path`/model.safetensors (rank 0), return their digests.

        With weight_transfer cuda_ipc the tensors stay where they are and are lent to other processes through a file in
        `path`, until the next training step or export. All ranks must call it. Ranks other than the first return an
        empty dict.
        """
        self._lent.clear()
        whole = self._whole()
        if self.rank != 0:
            return {}
        if self.config.weight_transfer == "cuda_ipc":
            self._lent = whole
            lend(whole, Path(path))
        else:
            whole = {name: tensor.cpu() for name, tensor in whole.items()}
            save_tensors(whole, Path(path))
        return tree_digests(whole)

    @shared_fate()
    def save(self, path: str) -> None:
        """Write the weights under Hugging Face names as `path`/model.safetensors (rank 0). All ranks must call it."""
        self._lent.clear()
        whole = self._whole()
        if self.rank == 0:
            save_tensors({name: tensor.cpu() for name, tensor in whole.items()}, Path(path))

    def _whole(self) -> dict[str, Tensor]:
        """On rank 0 every parameter of the policy, complete, by its Hugging Face name."""
        whole: dict[str, Tensor] = {}
        for parameter, shards in gather_parameters([chunk.module for chunk in self.policy], self.shape):
            if self.rank == 0:
                whole |= parameter.whole(shards)
        return whole

    def lent_digests(self, parts: Sequence[Part]) -> list[str]:
        """The digests of parts of what the last export lent; rank 0 is asked."""
        return part_digests(self._lent, parts)

    def proof(self) -> dict[str, Any]:
        """What this process computed with: routes and calls per boundary, kernel counters, patches in place."""
        return route_record(self.config, self.rank, self.device, self.calls, self._stand_ins, self.scorer)

    def close(self) -> None:
        """Leave the process groups and undo the stand-ins, as far as this rank came."""
        try:
            if dist.is_initialized():
                stop_groups()
        finally:
            while self._applied:
                self._applied.pop().undo()


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
