"""What a framework hands to a log-probability provider, and what it gets back.

Letters: T rows of one packed micro-batch, H hidden size, V_l vocabulary rows that this tensor-parallel rank holds.
Names, shapes and defaults of the public boundary are kept; `active`, `row_keys` and `kept_ids` are ours.
Every class checks itself on construction: ValueError, or TypeError where a value has the wrong type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

TokenLayoutKind = Literal["single", "zigzag", "allgather"]
LAYOUTS: tuple[TokenLayoutKind, ...] = ("single", "zigzag", "allgather")


@dataclass(frozen=True)
class TokenLayout:
    """Which rows of the packed tokens this context-parallel rank owns. Ownership only: never a reduction axis."""

    world_size: int = 1
    rank: int = 0
    layout: TokenLayoutKind = "single"

    def __post_init__(self) -> None:
        for name in ("world_size", "rank"):
            _whole(f"TokenLayout.{name}", getattr(self, name))
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"TokenLayout: rank {self.rank} of {self.world_size}; want 0 <= rank < world_size")
        if self.layout not in LAYOUTS:
            raise ValueError(f"TokenLayout.layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if (self.layout == "single") != (self.world_size == 1):
            raise ValueError(f"TokenLayout: {self.layout!r} with {self.world_size} ranks; single means one rank")


@dataclass(frozen=True)
class LinearProjection:
    """The LM head's rows on this rank: weight [V_l, H], and bias [V_l] or None on the weight's device."""

    weight: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        _matrix("LinearProjection.weight", self.weight)
        _floating("LinearProjection.weight", self.weight)
        if self.bias is not None:
            _vector("LinearProjection.bias", self.bias, self.weight.shape[0], self.weight.device)
            _floating("LinearProjection.bias", self.bias)


@dataclass(frozen=True)
class VocabPartition:
    """Which global token ids this rank's rows are, and how many ids exist.

    Rows [local_start, local_start + local_size) of `padded_size` rows are here; ids from `real_size` on are padding
    and belong to no token: they take no part in maximum, sum or entropy. A provider that can add up the gradient of
    the hidden states in `gradient_parts` equal runs of these rows, and the runs along a tree, then gives it the same
    bits for any number of ranks; `local_size` must be a multiple.
    """

    local_start: int
    local_size: int
    real_size: int
    padded_size: int
    gradient_parts: int = 1

    def __post_init__(self) -> None:
        for name in ("local_start", "local_size", "real_size", "padded_size"):
            _whole(f"VocabPartition.{name}", getattr(self, name))
        if self.local_start < 0 or self.local_size < 1:
            raise ValueError(
                f"VocabPartition: rows {self.local_start} + {self.local_size}; want start >= 0 and at least one row"
            )
        _whole("VocabPartition.gradient_parts", self.gradient_parts)
        if self.gradient_parts < 1 or self.local_size % self.gradient_parts:
            raise ValueError(
                f"VocabPartition: {self.local_size} rows do not split into {self.gradient_parts} gradient_parts"
            )
        if not 0 < self.real_size <= self.padded_size:
            raise ValueError(
                f"VocabPartition: real_size {self.real_size}, padded_size {self.padded_size}; want 0 < real <= padded"
            )
        if self.local_start + self.local_size > self.padded_size:
            raise ValueError(
                f"VocabPartition: rows up to {self.local_start + self.local_size} in a padded size of "
                f"{self.padded_size}; the partition does not fit"
            )


@dataclass(frozen=True)
class LinearLogpContext:
    """Where the logits come from: logits = hidden @ weight^T + bias, which nobody has to write down.

    `hidden` [T, H] holds all rows (gathered, under sequence parallelism) and is the same on all tensor-parallel
    ranks. The provider delivers its whole gradient: a projection sums its input's gradient over the group.
    """

    hidden: Tensor
    projection: LinearProjection
    vocab_partition: VocabPartition

    def __post_init__(self) -> None:
        _instance("LinearLogpContext.projection", self.projection, LinearProjection)
        _instance("LinearLogpContext.vocab_partition", self.vocab_partition, VocabPartition)
        _matrix("LinearLogpContext.hidden", self.hidden)
        _floating("LinearLogpContext.hidden", self.hidden)
        weight = self.projection.weight
        if self.hidden.shape[1] != weight.shape[1]:
            raise ValueError(
                f"LinearLogpContext: hidden is {list(self.hidden.shape)}, weight {list(weight.shape)}: widths differ"
            )
        _device("LinearLogpContext.hidden", self.hidden, weight.device)
        if weight.shape[0] != self.vocab_partition.local_size:
            raise ValueError(
                f"LinearLogpContext: weight has {weight.shape[0]} rows, the vocabulary partition says "
                f"{self.vocab_partition.local_size}"
            )


Temperature = float | Tensor


@dataclass(frozen=True)
class LinearLogpRequest:
    """Score `target_ids` (int64 [T], global ids, already shifted) on the rows of one micro-batch.

    One of `logits` (unscaled, [T, V_l], this rank's columns) and `context` must be there; native code needs the
    first, a provider that promises bits the second. `temperature` divides the logits exactly once, inside the
    scoring operation, in fp32: a positive finite number, or fp32 [T] of them.

    `active` bool [T] selects the rows that count (None: all); the others' targets may be anything, their results
    are +0 and they get no gradient. `row_keys` int64 [T] names the active rows, each once: comparisons never depend
    on packing, and a provider adds over tokens in ascending order of key.

    The support that top-k, top-p or min-p left comes as `kept_ids` int64 [T, N], global ids (unused places hold -1;
    a row of nothing else keeps all), as `kept_ids` int64 [n], row after row, with `kept_counts` int64 [T] of them per
    row (0: keeps all), or as `log_prob_keep_mask` bool [T, V_l] over this rank's columns. The log-probability is
    renormalised over it and the target, while entropy never is. `metadata` is for records; no value depends on it.
    """

    logits: Tensor | None
    target_ids: Tensor
    tensor_parallel_group: dist.ProcessGroup | None = None
    token_layout: TokenLayout = field(default_factory=TokenLayout)
    with_entropy: bool = False
    with_entropy_grad: bool = False
    chunk_size: int = -1
    log_prob_keep_mask: Tensor | None = None
    context: LinearLogpContext | None = None
    temperature: Temperature = 1.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    active: Tensor | None = None
    row_keys: Tensor | None = None
    kept_ids: Tensor | None = None
    kept_counts: Tensor | None = None

    def __post_init__(self) -> None:
        _tensor("LinearLogpRequest.target_ids", self.target_ids)
        _int64("LinearLogpRequest.target_ids", self.target_ids)
        if self.target_ids.ndim != 1:
            raise ValueError(f"LinearLogpRequest.target_ids must be [T], got {list(self.target_ids.shape)}")
        self._check_sources()
        _instance("LinearLogpRequest.token_layout", self.token_layout, TokenLayout)
        if not isinstance(self.metadata, Mapping):
            raise TypeError(f"LinearLogpRequest.metadata must be a mapping, got {type(self.metadata).__name__}")
        _whole("LinearLogpRequest.chunk_size", self.chunk_size)
        if self.chunk_size < 1 and self.chunk_size != -1:
            raise ValueError(f"LinearLogpRequest.chunk_size must be rows per chunk, or -1; got {self.chunk_size}")
        if self.with_entropy_grad and not self.with_entropy:
            raise ValueError("LinearLogpRequest: with_entropy_grad without with_entropy; ask for both")
        _check_temperature(self.temperature, self.target_ids)
        self._check_rows()
        self._check_support()

    def _check_sources(self) -> None:
        if self.logits is None and self.context is None:
            raise ValueError("LinearLogpRequest needs logits or a context to compute them from; got neither")
        if self.context is not None:
            _instance("LinearLogpRequest.context", self.context, LinearLogpContext)
            self._same_rows("context.hidden", self.context.hidden)
        if self.logits is not None:
            _matrix("LinearLogpRequest.logits", self.logits)
            _floating("LinearLogpRequest.logits", self.logits)
            self._same_rows("logits", self.logits)
        columns = self.logits.shape[1] if self.logits is not None else self.columns
        if columns != self.columns:
            raise ValueError(f"LinearLogpRequest: logits have {columns} columns, the context {self.columns}")

    def _same_rows(self, name: str, tensor: Tensor) -> None:
        if tensor.shape[0] != self.rows:
            raise ValueError(f"LinearLogpRequest: {name} has {tensor.shape[0]} rows for {self.rows} targets")
        _device(f"LinearLogpRequest.{name}", tensor, self.target_ids.device)

    def _check_rows(self) -> None:
        device = self.target_ids.device
        if self.active is not None:
            _vector("LinearLogpRequest.active", self.active, self.rows, device)
            if self.active.dtype != torch.bool:
                raise TypeError(f"LinearLogpRequest.active must be bool, got {self.active.dtype}")
        if self.row_keys is not None:
            _vector("LinearLogpRequest.row_keys", self.row_keys, self.rows, device)
            _int64("LinearLogpRequest.row_keys", self.row_keys)
            keys = (self.row_keys if self.active is None else self.row_keys[self.active]).sort().values
            if bool((keys[1:] == keys[:-1]).any()):
                raise ValueError("LinearLogpRequest.row_keys: two active rows have one key; a key names one row")

    def _check_support(self) -> None:
        if self.log_prob_keep_mask is not None and self.kept_ids is not None:
            raise ValueError("LinearLogpRequest: got log_prob_keep_mask and kept_ids; the support has one form")
        if self.log_prob_keep_mask is not None:
            mask = self.log_prob_keep_mask
            _matrix("LinearLogpRequest.log_prob_keep_mask", mask)
            _device("LinearLogpRequest.log_prob_keep_mask", mask, self.target_ids.device)
            if mask.dtype != torch.bool:
                raise TypeError(f"LinearLogpRequest.log_prob_keep_mask must be bool, got {mask.dtype}")
            if mask.shape != (self.rows, self.columns):
                raise ValueError(
                    f"LinearLogpRequest.log_prob_keep_mask must be {[self.rows, self.columns]}, got {list(mask.shape)}"
                )
        if self.kept_counts is not None:
            self._check_counts(self.kept_counts)
        elif self.kept_ids is not None:
            _matrix("LinearLogpRequest.kept_ids", self.kept_ids)
            _int64("LinearLogpRequest.kept_ids", self.kept_ids)
            self._same_rows("kept_ids", self.kept_ids)

    def _check_counts(self, counts: Tensor) -> None:
        _tensor("LinearLogpRequest.kept_counts", counts)
        _int64("LinearLogpRequest.kept_counts", counts)
        _vector("LinearLogpRequest.kept_counts", counts, self.rows, self.target_ids.device)
        if self.kept_ids is None:
            raise ValueError("LinearLogpRequest: kept_counts without kept_ids; give the ids, row after row")
        _tensor("LinearLogpRequest.kept_ids", self.kept_ids)
        _int64("LinearLogpRequest.kept_ids", self.kept_ids)
        _device("LinearLogpRequest.kept_ids", self.kept_ids, self.target_ids.device)
        if bool((counts < 0).any()) or self.kept_ids.shape != (int(counts.sum()),):
            raise ValueError(
                f"LinearLogpRequest: kept_counts add up to {int(counts.sum())} (none may be negative), "
                f"kept_ids are {list(self.kept_ids.shape)}"
            )

    @property
    def rows(self) -> int:
        """T."""
        return self.target_ids.shape[0]

    @property
    def columns(self) -> int:
        """V_l, padding included."""
        if self.context is not None:
            return self.context.projection.weight.shape[0]
        assert self.logits is not None
        return self.logits.shape[1]

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks."""
        return 1 if self.tensor_parallel_group is None else self.tensor_parallel_group.size()

    def active_rows(self) -> Tensor:
        """int64 [n]: the active rows, in ascending order of key where there are keys, else of row."""
        if self.active is None:
            rows = torch.arange(self.rows, device=self.target_ids.device)
        else:
            rows = self.active.nonzero()[:, 0]
        return rows if self.row_keys is None else rows[self.row_keys[rows].argsort()]

    def differentiable_inputs(self) -> dict[str, Tensor]:
        """The tensors, by name, that a gradient of the result must reach now."""
        if not torch.is_grad_enabled():
            return {}
        named: dict[str, Tensor | None] = {"logits": self.logits}
        if self.context is not None:
            projection = self.context.projection
            named = {"hidden": self.context.hidden, "weight": projection.weight, "bias": projection.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None and tensor.requires_grad}


@dataclass(frozen=True)
class LinearLogpResult:
    """`logp` [T, 1]; `entropy` [T] or None; what ran, which arithmetic it promises, and more for the record.

    The trailing 1 is the public boundary's. Nothing is checked here: a result is foreign until it was validated.
    """

    logp: Tensor
    entropy: Tensor | None = None
    backend_id: str = ""
    contract_id: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)


def _check_temperature(temperature: object, targets: Tensor) -> None:
    name = "LinearLogpRequest.temperature"
    if isinstance(temperature, Tensor):
        _vector(name, temperature, targets.shape[0], targets.device)
        if temperature.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {temperature.dtype}")
        if not bool(((temperature > 0) & (temperature < inf)).all()):
            raise ValueError(f"{name}: every value must be positive and finite")
    elif isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"{name} must be a number or a tensor, got {type(temperature).__name__}")
    elif not 0 < temperature < inf:
        raise ValueError(f"{name} must be positive and finite, got {temperature}")


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def _int64(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {tensor.dtype}")


def _floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}")


def _matrix(name: str, value: Tensor) -> None:
    _tensor(name, value)
    if value.ndim != 2:
        raise ValueError(f"{name} must have two axes, got {list(value.shape)}")


def _vector(name: str, value: Tensor, length: int, device: torch.device) -> None:
    _tensor(name, value)
    if value.shape != (length,):
        raise ValueError(f"{name} must be [{length}], got {list(value.shape)}")
    _device(name, value, device)


def _device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, its companions are on {device}; move it there")


def _instance(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise TypeError(f"{name} must be a {wanted.__name__}, got {type(value).__name__}")


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
