"""Rows with supports for the LM head, by a backend on a GPU or in Triton's interpreter, and by the definition."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.ops.logprob import finish, finish_logp, merge_states
from samebits.ops.sample_support import BACKENDS, Kept, kept_linear_logp


class Problem:
    """Supports of up to `most` ids, of `longer` for some rows; equal logits, zeros of both signs, an infinity.

    Everything comes back on the CPU; `device` is where the backend computes.
    """

    def __init__(
        self, rows: int, hidden: int, vocabulary: int, most: int, longer: Mapping[int, int], device: str
    ) -> None:
        g = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(rows, hidden, generator=g).bfloat16()
        self.hidden[7], self.hidden[8], self.hidden[9, 3] = 0.0, -0.0, torch.inf
        self.weight = (0.3 * torch.randn(vocabulary, hidden, generator=g)).bfloat16()
        self.weight[11] = self.weight[12]
        self.weight[13], self.weight[14] = 0.0, -0.0
        self.bias = torch.randn(vocabulary, generator=g).bfloat16()
        self.temperature = torch.linspace(0.4, 4, rows)
        sizes = torch.randint(1, most + 1, (rows,), generator=g)
        for row, size in longer.items():
            sizes[row] = size
        ids = [torch.randperm(vocabulary, generator=g)[:size].tolist() for size in sizes.tolist()]
        ids[5:10] = [[11, 12], [13, 14], [3, 11, 12], [3, 13, 14], [3, 15]]
        self.kept = Kept.of(ids)
        self.targets = torch.stack([row[len(row) // 2] for row in map(self.kept.row, range(rows))])
        self.upstream = torch.randn(rows, generator=g)
        self.device = device

    def run(self, backend: str, kind: str, bias: bool = True, rows: slice = slice(None), **given: Any) -> list[Tensor]:
        """Log-probabilities and gradients, those of weights added to what `main_grad` holds."""
        put = self._put(backend)
        hidden = put(self.hidden[rows].float()).requires_grad_()
        leaves = [put(t.clone()).requires_grad_() for t in (self.weight, self.bias)[: 1 + bias]]
        for leaf in leaves:
            leaf.main_grad = put(before(leaf))
        kept = given.get("kept", self.kept.select(torch.arange(len(self.hidden))[rows]))
        logp = kept_linear_logp(
            hidden, leaves[0], put(self.targets[rows]), kept, put(self.temperature[rows]),
            leaves[1] if bias else None, backend=backend, arithmetic=kind,
        )  # fmt: skip
        logp.backward(put(self.upstream[rows]))
        return [t.detach().cpu() for t in (logp, hidden.grad, *(leaf.main_grad for leaf in leaves))]

    def halves(self, backend: str, kind: str, weights: bool = True) -> list[Tensor]:
        """Log-probabilities, each rank's gradient of hidden and (`weights`) of its half of the weight."""
        put, size = self._put(backend), len(self.weight)
        impl, given = BACKENDS[backend], []
        hidden, temperature, upstream = map(put, (self.hidden, self.temperature, self.upstream))
        for half in (slice(0, size // 2), slice(size // 2, size)):
            kept = self.kept.inside(half.start, half.stop).to(hidden.device)
            weight, bias = put(self.weight[half]), put(self.bias[half]).float()
            given.append((hidden, weight, bias, put(self.targets - half.start), temperature, kept))
        states = [impl.kept_state(*each, kind) for each in given]
        state = merge_states([own[:, :5] for own in states])
        picked = torch.stack([own[:, 5] for own in states]).amax(0).to(torch.int32).view(torch.float32)
        dw, lse = put(before(self.weight)), finish(state, backend)
        parts = list(dw.chunk(2)) if weights else [None, None]
        dhidden = [
            impl.kept_backward(upstream, *each, lse, part, None, kind) for each, part in zip(given, parts, strict=True)
        ]
        return [t.cpu() for t in (finish_logp(state, picked, backend), *dhidden, dw)[: 3 + weights]]

    def _put(self, backend: str) -> Any:
        return partial(Tensor.to, device="cpu" if backend == "reference" else self.device)


def before(leaf: Tensor) -> Tensor:
    """What a gradient buffer holds before a backward pass."""
    held = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(6))
    held[0] = -0.0
    return held
