"""What a provider needs to know about Megatron's output layer, taken from the layer's own call.

Without a provider nothing is installed. A context belongs to the forward pass that made it: it is taken once,
right after that pass, and bound to that micro-batch's loss, so any number of micro-batches may be in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.collectives import all_gather_rows
from samebits.collectives.moves import own_rows
from samebits.linear_logp import LinearLogpContext, LinearProjection, VocabPartition


class _GatherForProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_rows(own, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # The provider's gradient is complete on every rank already; adding the ranks' copies would count it twice.
        return own_rows(grads[0], ctx.group), None


def gather_for_projection(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All rows from this rank's rows (sequence parallelism). Backward keeps the own share: the projection has
    summed its input's gradient over the group."""
    return own if group.size() == 1 else _GatherForProjection.apply(own, group)


def vocab_partition(
    rows: int, group: dist.ProcessGroup, real_vocab: int | None, padded_vocab: int | None = None
) -> VocabPartition:
    """This rank's part of a vocabulary split evenly over `group`, `rows` on each rank.

    An unknown padded size is rows * ranks. Raises ValueError when it is known and differs, and for an unknown real
    size: taking the padded one in its place would let padding into every sum.
    """
    padded = rows * group.size()
    if padded_vocab is not None and padded_vocab != padded:
        raise ValueError(
            f"padded vocabulary of {padded_vocab}, but {group.size()} ranks hold {rows} rows each ({padded} in all)"
        )
    if real_vocab is None:
        raise ValueError("the real vocabulary size is unknown: give it (the tokenizer's or the checkpoint's own)")
    return VocabPartition(group.rank() * rows, rows, real_vocab, padded)


def flatten_rows(hidden: Tensor) -> Tensor:
    """[B * S, H] from Megatron's [S, B, H], in the order in which its logits are handed out; [T, H] stays.

    Raises ValueError for another number of axes.
    """
    if hidden.ndim == 2:
        return hidden
    if hidden.ndim != 3:
        raise ValueError(f"hidden states must be [S, B, H] or [T, H], got {list(hidden.shape)}")
    return hidden.transpose(0, 1).reshape(-1, hidden.shape[2])


class OutputCapture:
    """Watches one output layer: each forward pass leaves one context, `take` hands it out."""

    def __init__(self, layer: torch.nn.Module, real_vocab: int | None, padded_vocab: int | None = None) -> None:
        """Raises ValueError for a layer that is not split over a vocabulary or is being watched already."""
        for name in ("output_size_per_partition", "tp_group"):
            if not hasattr(layer, name):
                raise ValueError(f"{type(layer).__name__} has no {name}: it is no column-parallel output layer")
        if any(
            isinstance(getattr(hook, "__self__", None), OutputCapture) for hook in layer._forward_pre_hooks.values()
        ):
            raise ValueError(f"this {type(layer).__name__} is captured already; close the other capture first")
        self._real_vocab, self._padded_vocab = real_vocab, padded_vocab
        self._waiting: LinearLogpContext | None = None
        self._versions: tuple[int, int] = (0, 0)
        self._with_gradients = False
        self._handle = layer.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def take(self) -> LinearLogpContext:
        """The context of the latest forward pass, once. Raises RuntimeError when there is none, when it was made
        without gradients but they are wanted now, and when its tensors were overwritten meanwhile."""
        context, self._waiting = self._waiting, None
        if context is None:
            raise RuntimeError("no context: the output layer has not run since the last one was taken")
        if torch.is_grad_enabled() and not self._with_gradients:
            raise RuntimeError(
                "the output layer ran without gradients (inside a recomputed region?), so no gradient would reach "
                "the model; keep the output layer outside of it"
            )
        if self._versions != _versions(context):
            raise RuntimeError("hidden states or weight were overwritten between the forward pass and the loss")
        return context

    def close(self) -> None:
        """Stop watching, and forget."""
        self._handle.remove()
        self._waiting = None

    def _before_forward(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._waiting = None  # one that nobody took belongs to another pass
        hidden, weight = _inputs(args, kwargs)
        weight = layer.weight if weight is None else weight  # tied weights come with the call
        group = layer.tp_group
        if getattr(layer, "sequence_parallel", False):
            hidden = gather_for_projection(hidden, group)
        bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
        partition = vocab_partition(layer.output_size_per_partition, group, self._real_vocab, self._padded_vocab)
        self._waiting = LinearLogpContext(flatten_rows(hidden), LinearProjection(weight, bias), partition)
        self._versions = _versions(self._waiting)
        self._with_gradients = torch.is_grad_enabled()


def capture_outputs(
    chunks: Sequence[torch.nn.Module], real_vocab: int | None, padded_vocab: int | None = None
) -> list[OutputCapture | None]:
    """One capture per model chunk; None for a chunk without an output layer (not the last pipeline stage).

    Wrappers (data parallel, mixed precision) are looked through. Call it only where a provider is configured.
    """
    layers = (getattr(_unwrapped(chunk), "output_layer", None) for chunk in chunks)
    return [None if layer is None else OutputCapture(layer, real_vocab, padded_vocab) for layer in layers]


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Hidden states and weight of a call `layer(input_, weight=None, ...)`."""
    hidden = args[0] if args else kwargs["input_"]
    return hidden, args[1] if len(args) > 1 else kwargs.get("weight")


def _versions(context: LinearLogpContext) -> tuple[int, int]:
    return context.hidden._version, context.projection.weight._version
