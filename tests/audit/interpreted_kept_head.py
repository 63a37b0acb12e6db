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

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from kept_head_problem import Problem

from samebits.arithmetic import dot, fma
from samebits.bits import first_difference
from samebits.ops.linear import triton as linear
from samebits.ops.logprob import reference
from samebits.ops.logprob import triton as logprob
from samebits.ops.sample_support import BACKENDS, kept_head

ROWS, VOCABULARY = 256, 48
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
NAMES = {"run": ("logp", "dhidden", "dw", "dbias"), "halves": ("logp", "dhidden0", "dhidden1", "dw")}


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


def problem(rows: int) -> Problem:
    """Supports of one id, of a few, and of the whole vocabulary."""
    longer = {10: 40, 20: VOCABULARY, 90: 40, 170: 40, 250: 40}
    return Problem(rows, 40, VOCABULARY, 2, {row: size for row, size in longer.items() if row < rows}, device="cpu")


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
    found = {arithmetic: differing(problem(ROWS).run, arithmetic) for arithmetic in ("fma32", "sm90")}
    few = problem(24)
    found["two ranks"] = differing(few.halves, "sm90")
    for number, (name, fault) in enumerate(FAULTS.items()):
        serve(faulty(Path(directory), number, *fault))
        found[name] = differing(few.run, "sm90")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
