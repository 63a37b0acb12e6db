"""One function for every arithmetic: a dot product by name, as the definition or as the compiled form."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.arithmetic import cdna3, fma32, sm90
from samebits.arithmetic.rounding import canonical_nan

ARITHMETICS = {"fma32": fma32.dot, "sm90": sm90.dot, "cdna3": cdna3.dot}
BACKENDS = ("reference", "cpu")


def dot(
    a: Tensor, b: Tensor, acc: Tensor | None = None, arithmetic: str = "fma32", backend: str = "reference"
) -> Tensor:
    """Rows against rows: a [M, K], b [N, K] bf16, acc [M, N] fp32 (+0 when not given) -> fp32 [M, N].

    The definitions run on any device and take equal leading axes in front of all of these.

    `arithmetic` says how products accumulate: `fma32` (one fused multiply-add per k, ascending; NaN is
    0x7fc00000), `sm90` (the tensor cores of H100 and H200, as measured) or `cdna3` (a published model of the
    matrix cores of MI300X, not confirmed on the chip). `backend` is `reference` (the readable definition) or
    `cpu` (compiled, the same bits). The definition of fma32 also takes fp32 factors. ValueError for other names,
    dtypes and shapes.
    """
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"dot: no arithmetic {arithmetic!r}; there is {', '.join(ARITHMETICS)}")
    if backend not in BACKENDS:
        raise ValueError(f"dot: no backend {backend!r}; there is {', '.join(BACKENDS)}")
    _check(a, b, acc, arithmetic, backend)
    if backend == "reference":
        out = ARITHMETICS[arithmetic](a, b, acc)
    else:
        from samebits.arithmetic import cpu

        start = (
            a.new_zeros(a.shape[0], b.shape[0], dtype=torch.float32)
            if acc is None
            else acc.clone(memory_format=torch.contiguous_format)
        )
        out = cpu.dot(_inner(a), _inner(b), start, arithmetic)
    return canonical_nan(out) if arithmetic == "fma32" else out


def _check(a: Tensor, b: Tensor, acc: Tensor | None, arithmetic: str, backend: str) -> None:
    defined = backend == "reference"
    wanted = (torch.bfloat16, torch.float32) if defined and arithmetic == "fma32" else (torch.bfloat16,)
    if a.dtype not in wanted or b.dtype not in wanted:
        raise ValueError(f"dot: a and b must be {' or '.join(map(str, wanted))}, got {a.dtype} and {b.dtype}")
    batched = defined and a.dim() > 2 and a.shape[:-2] == b.shape[:-2]
    if not (batched or a.dim() == b.dim() == 2) or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"dot: want a [M, K] and b [N, K], got {list(a.shape)} and {list(b.shape)}")
    shape = (*a.shape[:-1], b.shape[-2])
    if acc is not None and (acc.dtype != torch.float32 or acc.shape != shape):
        raise ValueError(f"dot: acc must be float32 {list(shape)}, got {acc.dtype} {list(acc.shape)}")


def _inner(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
