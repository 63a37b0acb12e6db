"""The vendor's matrix product, for shapes where it was seen to give the contract's bits: a certificate says so.

A certificate holds for one shape, layout, card, library version, workspace and settings of torch. It is issued by
comparing every output of torch.mm with the kernels of this room on random and adversarial inputs, launched one by one
and inside a captured graph; nothing is assumed about other shapes. Who issues them asks `launch.vendor_plan` where they
pay.

The vendor writes another NaN pattern (0x7fff). Every operator that follows replaces it by the canonical one, so it
can show in the bits of this one output and nowhere else.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from samebits.backends import device_arithmetic
from samebits.ops.linear import triton as own

ALIGNMENT = 16  # bytes; what a library may tell its kernels apart by
TRIALS = ("normal", "cancellation", "wide", "subnormal")


@dataclass(frozen=True)
class Certificate:
    """y [m, n] = x [m, k] weight [n, k]^T in bf16 gave the contract's bits in every trial, eagerly and in a graph."""

    m: int
    n: int
    k: int
    device: str
    arithmetic: str
    library: str
    torch: str
    workspace: str
    reduced_precision: str
    layout: str = f"row-major bfloat16, contiguous, aligned to {ALIGNMENT} bytes"
    trials: tuple[str, ...] = TRIALS

    def as_data(self) -> dict[str, object]:
        """Plain data, for records."""
        return asdict(self)


_Key = tuple[int, int, int, torch.device, object, object]
_certified: dict[_Key, Certificate] = {}
_served = [0]


def library_version() -> str:
    """Name and version of the matrix library that torch.mm calls."""
    for package in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        try:
            return f"cublas {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"torch's own (cuda {torch.version.cuda}, hip {torch.version.hip})"


def certify(m: int, n: int, k: int, device: torch.device, workspace: str = "") -> Certificate | None:
    """Try torch.mm for this shape; the certificate, kept for `product`, or None where any bit differs.

    `workspace`: what somebody chose as the library's scratch memory; torch's own size where it is empty.
    """
    library, reduced = _settings()
    _certified.pop((m, n, k, device, library, reduced), None)
    if not all(_agrees(*_inputs(trial, m, n, k, device)) for trial in TRIALS):
        return None
    certificate = Certificate(
        m,
        n,
        k,
        torch.cuda.get_device_name(device),
        device_arithmetic(device),
        library_version(),
        torch.__version__,
        str(library).rpartition(".")[2] + workspace,
        str(reduced),
    )
    _certified[m, n, k, device, library, reduced] = certificate
    return certificate


def _settings() -> tuple[object, object]:
    """What of this process' settings chooses among the library's kernels: anybody may change it at any time."""
    return (
        torch.backends.cuda.preferred_blas_library(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )


def certificates() -> tuple[Certificate, ...]:
    """All that this process holds."""
    return tuple(_certified.values())


def served() -> int:
    """How often `product` computed in this process. What a graph captures and replays doesn't show here."""
    return _served[0]


def revoke() -> None:
    """Forget every certificate: from now on the kernels of this room serve every shape."""
    _certified.clear()


def product(x: Tensor, weight: Tensor, y: Tensor) -> bool:
    """y = x weight^T by the vendor if that shape is certified here, under torch's present settings; False where nothing
    was done."""
    if not _certified or (x.shape[0], weight.shape[0], x.shape[1], x.device, *_settings()) not in _certified:
        return False
    if y.dtype != torch.bfloat16 or not all(t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 for t in (x, weight)):
        return False
    torch.mm(x, weight.t(), out=y)
    if not torch.cuda.is_current_stream_capturing():
        _served[0] += 1
    return True


def _agrees(x: Tensor, weight: Tensor) -> bool:
    want = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    own.matmul(x, weight, want, device_arithmetic(x.device), name="certify.linear")
    eager = torch.mm(x, weight.t())
    captured = torch.empty_like(want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(x, weight.t(), out=captured)
    graph.replay()
    return all(_same(got, want) for got in (eager, captured))


def _same(got: Tensor, want: Tensor) -> bool:
    both_nan = got.isnan() & want.isnan()
    return bool(((got.view(torch.int16) == want.view(torch.int16)) | both_nan).all())


def _inputs(trial: str, m: int, n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Seeded factors: unit normal, sums that cancel, exponents over 40 binades, products below the normal range."""
    g = torch.Generator(device).manual_seed(m * 7919 + n * 31 + k)
    x, weight = (torch.randn(rows, k, generator=g, device=device, dtype=torch.float32) for rows in (m, n))
    if trial == "cancellation":
        half = k // 2
        nudge = 1 + 2.0**-7 * (torch.rand(m, half, generator=g, device=device) < 0.25)
        x[:, half : 2 * half] = -x[:, :half].bfloat16() * nudge
        weight[:, half : 2 * half] = weight[:, :half]
    elif trial == "wide":
        x, weight = (t * torch.exp2(torch.randint(-20, 21, t.shape, generator=g, device=device)) for t in (x, weight))
    elif trial == "subnormal":
        x, weight = x * 2.0**-70, weight * 2.0**-66
    return x.bfloat16(), weight.bfloat16()
