"""The Triton kernels, on tensors of a CUDA or HIP device."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.backends import device_arithmetic, serve_only
from samebits.backends.device_counters import slot
from samebits.backends.launcher import cdiv, launcher
from samebits.ops.linear import kernels
from samebits.ops.linear.launch import Launch, for_amd, launch
from samebits.ops.linear.registry import KERNELS as KERNELS

FMA_TILE = 32

OPTIONS: dict[str, object] = {"enable_fp_fusion": False}
if torch.version.hip is not None:
    OPTIONS["matrix_instr_nonkdim"] = 16  # the instruction that the arithmetic cdna3 models


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: int, dtype: torch.dtype, arithmetic: str
) -> Tensor:
    y = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
    if bias is None and segments == 1 and arithmetic != "fma32" and _vendor_product(x, weight, y):
        return y
    matmul(x, weight, y, arithmetic, bias=bias, segments=segments, name="linear.forward")
    return y


def _vendor_product(x: Tensor, weight: Tensor, y: Tensor) -> bool:
    from samebits.ops.linear import vendor  # it compares with this module

    return vendor.product(x, weight, y)


def dgrad(dy: Tensor, weight: Tensor, dtype: torch.dtype, arithmetic: str) -> Tensor:
    dx = torch.empty(dy.shape[0], weight.shape[1], dtype=dtype, device=dy.device)
    matmul(dy, weight.t(), dx, arithmetic, name="linear.dgrad")
    return dx


def wgrad(dy: Tensor, x: Tensor, buffer: Tensor, arithmetic: str) -> None:
    matmul(dy.t(), x.t(), buffer, arithmetic, keep_c=True, name="linear.wgrad")


def bias_grad(dy: Tensor, buffer: Tensor) -> None:
    rows, columns = dy.shape
    counter = slot("linear.bias_grad", dy.device)
    launcher(kernels.column_sums)[(cdiv(columns, 64),)](
        dy, buffer, counter, rows, columns, dy.stride(0), BLOCK=64, ROWS=16, num_warps=2, enable_fp_fusion=False
    )


def matmul(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    arithmetic: str,
    *,
    bias: Tensor | None = None,
    segments: int = 1,
    keep_c: bool = False,
    name: str = "linear.matmul",
    how: Launch | None = None,
) -> None:
    """c [M, N] = a [M, K] b [N, K]^T (+ bias [N]), or added to the fp32 c with `keep_c`; one axis of each has stride 1.

    `how` overrides the launch: any of them gives the same bits.
    """
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0:
        return
    if arithmetic == "fma32":
        _fma(a, b, c, bias, segments, keep_c, name)
        return
    serve_only("linear", "triton", arithmetic, "fma32", device_arithmetic(a.device))
    how = how or launch(m, n, k, segments=segments, tma=k > 0 and suits_tma(a, b, c), keep_c=keep_c)
    if torch.version.hip is not None:
        how = for_amd(how)
    if how.kernel == "persistent":
        _persistent(a, b, c, bias, name, how)
    elif how.kernel == "tile":
        _tile(a, b, c, bias, segments, keep_c, name, how)
    else:
        _any(a, b, c, bias, segments, keep_c, name, how)


def suits_tma(*tensors: Tensor) -> bool:
    """Can tensor descriptors hold all of these, or their transposes?"""
    for x in tensors:
        strides = x.stride()
        if 1 not in strides or x.data_ptr() % 16 or max(strides) * x.element_size() % 16:
            return False
    return True


def _factor(x: Tensor, rows: int, k: int) -> tuple[TensorDescriptor, bool]:
    """The descriptor of a factor in tiles of [rows, k], and whether it is stored as [k, rows]."""
    shape, strides = [*x.shape], [*x.stride()]
    if strides[1] == 1:
        return TensorDescriptor(x, shape, strides, [rows, k]), False
    return TensorDescriptor(x, shape[::-1], strides[::-1], [k, rows]), True


def _result(c: Tensor, how: Launch, row_bytes: int) -> tuple[TensorDescriptor, int]:
    """The descriptor that tiles are stored through, `row_bytes` of each row at a time, and how many times."""
    subtiles = max(1, how.block_n * c.element_size() // row_bytes)
    return TensorDescriptor(c, [*c.shape], [*c.stride()], [how.block_m, how.block_n // subtiles]), subtiles


def _persistent(a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, name: str, how: Launch) -> None:
    (m, k), n = a.shape, b.shape[0]
    a_desc, a_t = _factor(a, how.block_m, how.block_k)
    b_desc, b_t = _factor(b, how.block_n, how.block_k)
    c_desc, subtiles = _result(c, how, 256)
    tiles = cdiv(m, how.block_m) * cdiv(n, how.block_n)
    launcher(kernels.matmul_persistent)[(min(tiles, how.per_sm * _sms(a.device)),)](
        a_desc, b_desc, c_desc, bias, slot(name, a.device), m, n, k,
        A_T=a_t, B_T=b_t, BLOCK_M=how.block_m, BLOCK_N=how.block_n, BLOCK_K=how.block_k, GROUP=how.group,
        SUBTILES=subtiles, HAS_BIAS=bias is not None, OUT_BF16=c.dtype == torch.bfloat16,
        num_warps=how.warps, num_stages=how.stages, **OPTIONS,
    )  # fmt: skip


def _tile(
    a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, segments: int, keep_c: bool, name: str, how: Launch
) -> None:
    (m, k), n = a.shape, b.shape[0]
    a_desc, a_t = _factor(a, how.block_m, how.block_k)
    b_desc, b_t = _factor(b, how.block_n, how.block_k)
    c_desc, subtiles = _result(c, how, 128)
    programs = cdiv(m, how.block_m) * cdiv(n, how.block_n)
    partials = None
    if segments > 1:
        programs = min(programs, _sms(a.device))
        levels = segments.bit_length() - 1
        partials = torch.empty(programs, levels, how.block_m, how.block_n, dtype=torch.float32, device=a.device)
    launcher(kernels.matmul_tile)[(programs,)](
        a_desc, b_desc, c_desc, c if keep_c else None, bias, partials, slot(name, a.device), m, n, k, c.stride(0),
        A_T=a_t, B_T=b_t, BLOCK_M=how.block_m, BLOCK_N=how.block_n, BLOCK_K=how.block_k, GROUP=how.group,
        SUBTILES=subtiles, SEGMENTS=segments, CONTINUE=keep_c, HAS_BIAS=bias is not None,
        OUT_BF16=c.dtype == torch.bfloat16, num_warps=how.warps, num_stages=how.stages, **OPTIONS,
    )  # fmt: skip


def _any(
    a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, segments: int, keep_c: bool, name: str, how: Launch
) -> None:
    (m, k), n = a.shape, b.shape[0]
    last = segments == 1
    target = c if last else torch.empty(segments, m, n, dtype=torch.float32, device=a.device)
    grid = (cdiv(m, how.block_m) * cdiv(n, how.block_n), segments)
    launcher(kernels.matmul_any)[grid](
        a, b, target, bias if last else None, slot(name, a.device), m, n, k // segments,
        *a.stride(), *b.stride(), target.stride(-2),
        BLOCK_M=how.block_m, BLOCK_N=how.block_n, BLOCK_K=how.block_k, CONTINUE=keep_c,
        EVEN=(how.repeat or m % how.block_m == 0) and n % how.block_n == k // segments % how.block_k == 0,
        REPEAT=how.repeat,
        HAS_BIAS=last and bias is not None, SWAPPED=how.swapped, OUT_BF16=target.dtype == torch.bfloat16,
        num_warps=how.warps, num_stages=how.stages, **OPTIONS,
    )  # fmt: skip
    if not last:
        _add_segments(target, c, bias)


def _fma(a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, segments: int, keep_c: bool, name: str) -> None:
    (m, k), n = a.shape, b.shape[0]
    last = segments == 1
    target = c if last else torch.empty(segments, m, n, dtype=torch.float32, device=a.device)
    grid = (cdiv(m, FMA_TILE) * cdiv(n, FMA_TILE), segments)
    launcher(kernels.matmul_fma)[grid](
        a, b, target, bias if last else None, slot(name, a.device), m, n, k // segments,
        *a.stride(), *b.stride(), target.stride(-2),
        BLOCK_M=FMA_TILE, BLOCK_N=FMA_TILE, CONTINUE=keep_c, HAS_BIAS=last and bias is not None,
        OUT_BF16=target.dtype == torch.bfloat16, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if not last:
        _add_segments(target, c, bias)


def _add_segments(partials: Tensor, c: Tensor, bias: Tensor | None) -> None:
    segments, m, n = partials.shape
    counter = slot("linear.add_segments", c.device)
    launcher(kernels.add_segments)[(cdiv(m * n, 1024),)](
        partials, c, bias, counter, m * n, n, SEGMENTS=segments, HAS_BIAS=bias is not None,
        OUT_BF16=c.dtype == torch.bfloat16, BLOCK=1024, enable_fp_fusion=False,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
