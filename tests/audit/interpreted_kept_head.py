"""The LM head over supports by its GPU code, with the kernel in Triton's interpreter, against the definition.

`TRITON_INTERPRET=1 python interpreted_kept_head.py DIRECTORY` prints as JSON what differs: under two arithmetics, on
two ranks, and under each of FAULTS. The interpreter's own multiply-add rounds twice and its products add up as numpy
does, so it gets those of the arithmetic; kernels of other rooms are replaced by their definitions.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from samebits.arithmetic import dot, fma
from samebits.bits import first_difference
from samebits.ops.linear import triton as linear
from samebits.ops.logprob import finish, finish_logp, merge_states, reference
from samebits.ops.logprob import triton as logprob
from samebits.ops.sample_support import BACKENDS, Kept, kept_head, kept_linear_logp

ROWS, HIDDEN, VOCABULARY = 256, 40, 48
FAULTS = {
    "eight kept columns share a step": ("together: int = 2 * SIDE", "together: int = 8"),
    "main_grad is not continued": ("mask=wanted, other=0.0", "mask=wanted & (at < 0)[None, :], other=0.0"),
    "two tokens share a step of the weight gradient": ("together=1", "together=2"),
    "the tokens of an id run backwards": ("ids, order = ids.sort(stable=True)", "ids, order = ordered_badly(ids)"),
    "the first id of a chunk is missed": ("(ids >= columns.start)", "(ids > columns.start)"),
}
BADLY = """
def ordered_badly(ids):
    order = (ids * len(ids) - torch.arange(len(ids))).argsort()
    return ids[order], order
"""
NAMES = {"whole": ("logp", "dhidden", "dw", "dbias"), "halves": ("logp", "dhidden0", "dw0", "dhidden1", "dw1")}


def _array(handle: TensorHandle, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(handle.data)).view(dtype)


def _fma(self: Any, *operands: TensorHandle) -> TensorHandle:
    factors = torch.broadcast_tensors(*(_array(each, torch.float32) for each in operands))
    return TensorHandle(fma(*factors).numpy(), tl.float32)


def _dot(arithmetic: str) -> Any:
    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *_: Any) -> TensorHandle:
        left, right = _array(a, torch.bfloat16), _array(b, torch.bfloat16).t().contiguous()
        sums = dot(left, right, _array(acc, torch.float32), arithmetic, backend="cpu")
        return TensorHandle(sums.numpy(), tl.float32)

    return create_dot


def _matmul(a: Tensor, b: Tensor, c: Tensor, arithmetic: str, bias: Tensor | None = None, **_: Any) -> None:
    products = dot(a, b, None, arithmetic, backend="cpu")
    c.copy_(products if bias is None else products + bias)


def _picked_state(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    z = reference.scaled(logits, temperature)
    bits = z.gather(1, targets.clamp_min(0)[:, None]).view(torch.int32).long() & 0xFFFFFFFF
    return torch.cat([reference.state(z, 1.0), torch.where(targets[:, None] < 0, -1, bits)], dim=1)


def _logit_gradient(
    logits: Tensor, upstream: Tensor, lse: Tensor, targets: Tensor, temperature: Tensor, dz: Tensor, first: int
) -> None:
    dz.copy_(reference.logit_gradient(upstream, logits, targets - first, temperature, lse))


class Problem:
    """Supports of one id, of a few, of the whole vocabulary; equal logits, zeros of both signs, an infinity."""

    def __init__(self, rows: int) -> None:
        g = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(rows, HIDDEN, generator=g).bfloat16()
        self.hidden[7], self.hidden[8], self.hidden[9, 3] = 0.0, -0.0, torch.inf
        self.weight = (0.4 * torch.randn(VOCABULARY, HIDDEN, generator=g)).bfloat16()
        self.weight[11] = self.weight[12]
        self.weight[13], self.weight[14] = 0.0, -0.0
        self.bias = torch.randn(VOCABULARY, generator=g).bfloat16()
        self.temperature = torch.linspace(0.4, 3, rows)
        sizes = torch.randint(1, 3, (rows,), generator=g)
        sizes[10::80], sizes[20] = 40, VOCABULARY
        ids = [torch.randperm(VOCABULARY, generator=g)[:size].tolist() for size in sizes.tolist()]
        ids[5:10] = [[11, 12], [13, 14], [3, 11, 12], [3, 13, 14], [3, 15]]
        self.kept = Kept.of(ids)
        self.targets = torch.stack([row[len(row) // 2] for row in map(self.kept.row, range(rows))])
        self.upstream = torch.randn(rows, generator=g)

    def whole(self, backend: str, arithmetic: str) -> list[Tensor]:
        """Log-probabilities and gradients, those of weights added to what `main_grad` holds."""
        hidden = self.hidden.float().requires_grad_()
        weight, bias = (t.clone().requires_grad_() for t in (self.weight, self.bias))
        for leaf in (weight, bias):
            leaf.main_grad = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(6))
            leaf.main_grad[0] = -0.0
        logp = kept_linear_logp(
            hidden, weight, self.targets, self.kept, self.temperature, bias, backend=backend, arithmetic=arithmetic
        )
        logp.backward(self.upstream)
        return [logp.detach(), hidden.grad, weight.main_grad, bias.main_grad]

    def halves(self, backend: str, arithmetic: str) -> list[Tensor]:
        """Log-probabilities and each rank's gradients, where two ranks hold half of the vocabulary each."""
        impl, size = BACKENDS[backend], VOCABULARY // 2
        given = []
        for start in (0, size):
            here, kept = slice(start, start + size), self.kept.inside(start, start + size)
            given.append((self.hidden, self.weight[here], None, self.targets - start, self.temperature, kept))
        states = [impl.kept_state(*each, arithmetic) for each in given]
        state = merge_states([own[:, :5] for own in states])
        picked = torch.stack([own[:, 5] for own in states]).amax(0).to(torch.int32).view(torch.float32)
        found, lse = [finish_logp(state, picked)], finish(state)
        for each in given:
            dw = torch.zeros(each[1].shape)
            found += [impl.kept_backward(self.upstream, *each, lse, dw, None, arithmetic), dw]
        return found


def differing(how: Callable[[str, str], list[Tensor]], arithmetic: str) -> list[str]:
    """The outputs, by name, whose bits are not the definition's."""
    InterpreterBuilder.create_dot = _dot(arithmetic)
    found = zip(NAMES[how.__name__], how("triton", arithmetic), how("reference", arithmetic), strict=True)
    return [name for name, *pair in found if first_difference(*pair) is not None]


def serve(module: ModuleType) -> None:
    """Let the backend compute by this form of `kept_head`."""
    backend: Any = BACKENDS["triton"]
    backend.kept_state, backend.kept_backward = module.kept_state, module.kept_backward


def faulty(directory: Path, number: int, old: str, new: str) -> ModuleType:
    """The module with one text replaced."""
    source = Path(str(kept_head.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"not once: {old!r}"
    path = directory / f"faulty_kept_head{number}.py"
    path.write_text(source.replace(old, new) + BADLY, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(directory: str) -> None:
    changes: dict[Any, dict[str, Any]] = {
        InterpreterBuilder: {"create_fma": _fma},
        linear: {"matmul": _matmul},
        # several blocks of rows and chunks of columns
        logprob: {"picked_state": _picked_state, "logit_gradient": _logit_gradient, "TOKENS": 130, "COLUMNS": 8},
    }
    for owner, given in changes.items():
        for name, value in given.items():
            setattr(owner, name, value)
    found = {arithmetic: differing(Problem(ROWS).whole, arithmetic) for arithmetic in ("fma32", "sm90")}
    few = Problem(24)
    found["two ranks"] = differing(few.halves, "sm90")
    for number, (name, fault) in enumerate(FAULTS.items()):
        serve(faulty(Path(directory), number, *fault))
        found[name] = differing(few.whole, "sm90")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
