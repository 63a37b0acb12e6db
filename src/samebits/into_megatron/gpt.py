"""Megatron's GPTModel, asked for log-probabilities of given tokens instead of logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from samebits.collectives import scatter_rows, select_owner
from samebits.contract.routes import ModuleRoutes
from samebits.into_megatron.capture import gather_for_projection, vocab_partition
from samebits.into_megatron.layout import MicroBatch
from samebits.into_megatron.model import ModelShape
from samebits.into_megatron.order import ordered_embedding
from samebits.into_megatron.proof import CallCounts
from samebits.into_megatron.rows import take_rows
from samebits.into_megatron.shared_tokens import every_row, own_rows_of
from samebits.linear_logp import LinearLogp, LinearLogpContext, LinearLogpRequest, LinearProjection, TokenLayout
from samebits.ops.embedding import embedding
from samebits.ops.logprob import linear_logp


class ScoringModel(GPTModel):
    """A GPTModel whose forward takes a `MicroBatch` and returns the fp32 log-probabilities [n] of its targets.

    The embedding is a copy on every route; it is Megatron's own code only where all groups are. Log-probabilities
    come from the provider of `scorer`; without one, from Megatron's output layer and cross entropy.
    """

    def __init__(
        self,
        shape: ModelShape,
        case: ModuleRoutes,
        temperature: float,
        scorer: LinearLogp,
        *,
        layout: TokenLayout,
        config: Any,
        spec: Any,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=shape.padded_vocab(config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            share_embeddings_and_output_weights=shape.tied,
            # On the R route positions come with the packing, and rotation happens inside our attention.
            position_embedding_type="rope" if case.attention == "P" else "none",
            rotary_base=shape.rope_base,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
        if shape.tied and pre_process and post_process:
            # Two backward passes reach the one weight, and either may bypass autograd: Megatron must add both.
            self.embedding.word_embeddings.weight.zero_out_wgrad = True
        self.shape = shape
        self.case = case
        self.temperature = temperature
        self.scorer = scorer
        self.layout = layout

    def whole_name(self, name: str) -> str:
        """The name that a parameter of this chunk has in the whole model: layers count from the first chunk's."""
        prefix = "decoder.layers."
        if not name.startswith(prefix):
            return name
        number, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{self.decoder.layers[int(number)].layer_number - 1}.{rest}"

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this chunk's parameters out of those of the whole model, in place.

        Raises RuntimeError naming those that are not there.
        """
        parameters = {self.whole_name(name): parameter for name, parameter in self.named_parameters()}
        missing = sorted(set(parameters) - set(tensors))
        if missing:
            raise RuntimeError(f"the model has parameters that the weight map lacks: {', '.join(missing)}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])

    def forward(self, batch: MicroBatch) -> Tensor:
        """fp32 [n]: log-probability of `batch.targets`, each predicted from its row of `batch.rows`.

        A chunk that is not the last gives the hidden states that the next one starts from.
        """
        if self.config.gradient_order is not None:
            self.config.gradient_order.packing = batch.packing
        embeds = self.pre_process and not self.case.all_native
        return super().forward(
            input_ids=batch.ids,
            position_ids=None,
            attention_mask=self._mask(batch),
            decoder_input=self._embed(batch.ids) if embeds else None,
            labels=batch,
            packed_seq_params=batch.packing,
        )

    def _mask(self, batch: MicroBatch) -> Tensor | None:
        """Megatron's own attention wants a mask, True where it must not look; padding is on the right."""
        if self.case.attention == "R":
            return None
        width = batch.ids.shape[1]
        return torch.ones(1, 1, width, width, dtype=torch.bool, device=batch.ids.device).triu(1)

    def _embed(self, ids: Tensor) -> Tensor:
        """[sequence, batch, hidden] (this rank's rows under sequence parallelism): the owner's row of each id."""
        table = self.embedding.word_embeddings
        flat = ids.t().reshape(-1)
        if self.config.gradient_order is None:
            rows = embedding(flat, table.weight, start=table.vocab_start_index)
        else:
            rows = ordered_embedding(flat, table.weight, table.vocab_start_index, self.config.gradient_order)
        rows = select_owner(rows, flat // table.num_embeddings_per_partition, self.tp_group)
        hidden = rows.view(ids.shape[1], ids.shape[0], -1)
        return scatter_rows(hidden, self.tp_group) if self.config.sequence_parallel else hidden

    def _postprocess(self, hidden_states: Tensor, labels: MicroBatch, **unused: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.shape.tied else self.output_layer.weight
        if not self.scorer.configured:
            return self._score_native(hidden_states, weight, labels)
        split = self.config.sequence_parallel
        gathered = gather_for_projection(hidden_states, self.tp_group) if split else hidden_states
        flat = gathered.reshape(-1, gathered.shape[-1])
        targets, keys = (torch.full((flat.shape[0],), -1, device=flat.device) for _ in range(2))
        targets[labels.rows], keys[labels.rows] = labels.targets, labels.slots
        temperature = self._temperatures(labels, flat.shape[0])
        order = self.config.gradient_order
        if order is not None and labels.kept is not None:
            raise ValueError("strict_gradients: a gradient over the tokens that a sampler kept has no such order")
        if order is None or self.config.context_parallel_size == 1:
            counts, ids = _by_row(labels, flat.shape[0])
            request = self._request(flat, weight, targets, keys, temperature, self.layout)
            request = replace(request, kept_ids=ids, kept_counts=counts)
            logp, _ = self.scorer(request, lambda asked: self._native_rows(asked, hidden_states, weight, labels))
            return take_rows(logp[:, 0], labels.rows)
        # Every rank scores all tokens, so that one of them can add up the weight's gradient in order.
        rows = order.rows()
        request = self._request(
            every_row(flat, rows),
            weight if self.cp_group.rank() == 0 else weight.detach(),
            rows.everyones(targets),
            rows.everyones(keys),
            rows.everyones(temperature) if isinstance(temperature, Tensor) else temperature,
            TokenLayout(1, 0, "single"),
        )
        logp, _ = self.scorer(request, _no_native)
        return take_rows(own_rows_of(logp[:, 0], rows), labels.rows)

    def _request(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        keys: Tensor,
        temperature: float | Tensor,
        layout: TokenLayout,
    ) -> LinearLogpRequest:
        """Its active rows are keyed by their slots, so that sums over tokens follow the samples' order."""
        ranks, order = self.tp_group.size(), self.config.gradient_order
        partition = vocab_partition(weight.shape[0], self.tp_group, self.shape.vocab, self.shape.padded_vocab(ranks))
        if order is not None:
            partition = replace(partition, gradient_parts=order.own_parts)
        return LinearLogpRequest(
            logits=None,
            target_ids=targets,
            tensor_parallel_group=self.tp_group,
            token_layout=layout,
            context=LinearLogpContext(hidden, LinearProjection(weight), partition),
            temperature=temperature,
            active=keys >= 0,
            row_keys=keys,
        )

    def _temperatures(self, batch: MicroBatch, rows: int) -> float | Tensor:
        """The one temperature, or fp32 [rows] with 1 on rows that nobody scores."""
        if batch.temperature is None:
            return self.temperature
        return torch.ones(rows, device=batch.rows.device).index_copy(0, batch.rows, batch.temperature)

    def _native_rows(
        self, asked: LinearLogpRequest, hidden: Tensor, weight: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, None]:
        """Megatron's own log-probabilities in the provider's form: [T, 1], +0 on inactive rows."""
        logp = self._score_native(hidden, weight, batch)
        return logp.new_zeros(asked.rows).index_copy(0, batch.rows, logp)[:, None], None

    def _score_native(self, hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
        """Megatron's output layer and cross entropy: all rows are scored, and those of active tokens are kept."""
        logits = self.output_layer(hidden, weight=weight)[0].float()
        if batch.temperature is not None or self.temperature != 1.0:
            each = self._temperatures(batch, logits.shape[0] * logits.shape[1])
            logits = logits / (each.view(*logits.shape[:2], 1) if isinstance(each, Tensor) else each)
        padding = self._padding_columns(weight.shape[0])
        if padding:
            logits = torch.cat(
                [logits[..., :-padding], logits.new_full((*logits.shape[:-1], padding), float("-inf"))], dim=-1
            )
        targets = batch.targets.new_zeros(logits.shape[0] * logits.shape[1])
        targets[batch.rows] = batch.targets
        loss = vocab_parallel_cross_entropy(logits, targets.view(logits.shape[:2]))
        return -take_rows(loss.reshape(-1), batch.rows)

    def _padding_columns(self, columns: int) -> int:
        """How many of this rank's last vocabulary columns belong to no token."""
        end = (self.tp_group.rank() + 1) * columns
        return min(columns, max(0, end - self.shape.vocab))


def _no_native(asked: LinearLogpRequest) -> tuple[Tensor, None]:
    raise RuntimeError("strict_gradients: the provider is unavailable, and native code has no such order of sums")


def _by_row(batch: MicroBatch, rows: int) -> tuple[Tensor | None, Tensor | None]:
    """How many ids each of `rows` rows keeps (0: all), and these ids, row after row."""
    if batch.kept is None:
        return None, None
    counts = batch.kept.counts.new_zeros(rows).index_copy(0, batch.rows, batch.kept.counts)
    return counts, batch.kept.select(batch.rows.argsort()).ids


def count_calls(model: ScoringModel, calls: CallCounts) -> None:
    """Count the calls of every boundary of `model` from now on, also of those that are no module of their own."""
    calls.watch(model)
    if model.post_process:
        score = linear_logp if model.case.logp == "R" else vocab_parallel_cross_entropy
        model.register_forward_hook(calls.counter("log_probability", score))
    if model.pre_process and not model.case.all_native:
        # Megatron's embedding module only holds the table then, and its own hook never fires.
        calls.modules.pop("embedding.word_embeddings")
        model.register_forward_hook(calls.counter("embedding.word_embeddings", embedding))
