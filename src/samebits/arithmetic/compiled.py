"""An owned primitive over a whole tensor, in the compiled form of its device: the bits of the reference."""

from __future__ import annotations

from torch import Tensor


def exp2(x: Tensor) -> Tensor:
    """2^x of a contiguous fp32 tensor, on the CPU (C++) or a CUDA device (Triton)."""
    if x.is_cuda:
        from samebits.arithmetic import triton

        return triton.exp2(x)
    from samebits.arithmetic import cpu

    return cpu.exp2(x)
