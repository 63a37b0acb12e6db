"""sm90_vectors.py OUT.safetensors: record what a Hopper card computes, and compare it with the prediction.

Needs an H100 or H200, torch with CUDA, Triton and safetensors; not the compiled kernels. For every distribution of
`samebits.testing.dot_inputs` the same dot products go through `wgmma`, through `mma.sync` and through `torch.mm`,
and are compared with the arithmetic `sm90` on the CPU; then the owned primitives in Triton are compared with their
definition over all 2^32 inputs. The inputs and the card's outputs are written to OUT.safetensors, with the card,
the driver and the versions in its metadata. Exits with 1 when a prediction was wrong.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from safetensors.torch import save_file

from samebits.arithmetic import exp2, round_bf16, sigmoid
from samebits.arithmetic import triton as owned
from samebits.arithmetic.sm90 import dot as predicted
from samebits.bits import raw
from samebits.testing.dot_inputs import DISTRIBUTIONS, draw

ROWS, COLUMNS = 256, 16
DEPTH = {"normal": 64, "cancellation": 64}
DEFAULT_DEPTH = 32
# name -> (BLOCK_M, BLOCK_K, num_warps, the instruction that must appear)
ROUTES = {
    "wgmma": (64, 64, 4, "wgmma.mma_async"),
    "wgmma16": (64, 16, 4, "wgmma.mma_async"),
    "mma_sync": (16, 64, 1, "mma.sync"),
    "mma_sync16": (16, 16, 1, "mma.sync"),
}


@triton.jit
def dot_kernel(a, b, acc, out, N, K, START: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    at = m[:, None] * N + n[None, :]
    total = tl.load(acc + at) if START else tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        right = tl.load(b + n[None, :] * K + k[:, None], mask=k[:, None] < K, other=0.0)
        total = tl.dot(left, right, total)
    tl.store(out + at, total)


def on_card(route: str, a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor | None) -> torch.Tensor:
    block_m, block_k, warps, instruction = ROUTES[route]
    left, right = a.cuda(), b.cuda()
    start = None if acc is None else acc.cuda()
    out = torch.empty(a.shape[0], b.shape[0], device="cuda")
    compiled = dot_kernel[(a.shape[0] // block_m, b.shape[0] // 16)](
        left, right, out if start is None else start, out, b.shape[0], a.shape[1],
        START=start is not None, BM=block_m, BN=16, BK=block_k, num_warps=warps,
    )  # fmt: skip
    if instruction not in compiled.asm["ptx"]:
        raise RuntimeError(f"{route}: no {instruction} in the kernel that Triton made; choose other tiles")
    return out.cpu()


def compare(what: str, card: torch.Tensor, prediction: torch.Tensor) -> list[tuple[int, ...]]:
    wrong = (raw(card) != raw(prediction)).nonzero()
    if len(wrong):
        print(f"WRONG {what}: {len(wrong)} of {card.numel()}")
    return [tuple(int(i) for i in index) for index in wrong[:2]]


def explain(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor | None, card, prediction, index) -> None:  # type: ignore[no-untyped-def]
    m, n = index
    hexes = [f"{float(x):.8g}*{float(y):.8g}" for x, y in zip(a[m], b[n], strict=True)]
    start = 0.0 if acc is None else float(acc[m, n])
    print(f"  ({m}, {n}) start {start!r}: card {int(raw(card)[m, n]) & 0xFFFFFFFF:08x} {float(card[m, n])!r}, "
          f"predicted {int(raw(prediction)[m, n]) & 0xFFFFFFFF:08x} {float(prediction[m, n])!r}")  # fmt: skip
    print("   ", " ".join(hexes[:64]))


def dot_products(save: dict[str, torch.Tensor]) -> int:
    wrong = 0
    for name in DISTRIBUTIONS:
        depth = DEPTH.get(name, DEFAULT_DEPTH)
        sizes = [(ROWS, COLUMNS, depth), (512, 128, 173), (512, 128, 32), (2048, 256, 16)]
        for size_index, (rows, columns, k) in enumerate(sizes):
            a, b, acc = draw(name, rows, columns, k, seed=size_index)
            prediction = predicted(a, b, acc)
            outputs = {route: on_card(route, a, b, acc) for route in ROUTES}
            if acc is None and k % 8 == 0:
                outputs["torch.mm"] = torch.mm(a.cuda(), b.cuda().t(), out_dtype=torch.float32).cpu()
            for route, card in outputs.items():
                found = compare(f"{name} {rows}x{columns}x{k} {route}", card, prediction)
                wrong += bool(found)
                if route == "wgmma":
                    for index in found:
                        explain(a, b, acc, card, prediction, index)
            if size_index == 0:
                parts = {"a": a, "b": b, "acc": acc, "card": outputs["wgmma"]}
                save |= {f"{name}.{part}": t for part, t in parts.items() if t is not None}
    print(f"dot products: {len(DISTRIBUTIONS)} distributions, {wrong} predictions wrong")
    return wrong


def digest(bits: torch.Tensor, first: int) -> int:
    """sum of bits * (2 i + 1) modulo 2^64 over the inputs i: what the C++ test computes too."""
    index = torch.arange(first, first + bits.numel(), device=bits.device)
    return int((bits.long() * (2 * index + 1)).sum())


def patterns(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, device="cuda").to(torch.int32).view(torch.float32)


def primitives() -> int:
    """Every fp32 input: the Triton form against the definition run on the card; the digests are for the CPU."""
    chunk, wrong = 2**26, 0
    functions: dict[str, tuple[Callable, Callable]] = {
        "exp2": (owned.exp2, exp2), "sigmoid": (owned.sigmoid, sigmoid), "round_bf16": (owned.round_bf16, round_bf16),
        "sqrt": (owned.sqrt, torch.sqrt),
    }  # fmt: skip
    for name, (fast, definition) in functions.items():
        total = 0
        for first in range(0, 2**32, chunk):
            x = patterns(first, chunk)
            y, want = fast(x), definition(x)
            if name == "sqrt":
                y, want = (torch.where(t.isnan(), torch.nan, t) for t in (y, want))
            differ = raw(y) != raw(want)
            if bool(differ.any()):
                wrong += 1
                i = int(differ.nonzero()[0])
                print(f"WRONG {name} at {int(raw(x)[i]) & 0xFFFFFFFF:08x}: {y[i].item()!r} not {want[i].item()!r}, "
                      f"{int(differ.sum())} in this chunk")  # fmt: skip
            mask = 0xFFFF if y.element_size() == 2 else 0xFFFFFFFF
            total = (total + digest(raw(y).long() & mask, first)) % 2**64
        print(f"{name}: digest {total:016x}")
    g = torch.Generator(device="cuda").manual_seed(1)
    x, d = (torch.randint(-(2**31), 2**31, (2**26,), device="cuda", generator=g).int().view(torch.float32)
            for _ in range(2))  # fmt: skip
    y, want = (torch.where(t.isnan(), torch.nan, t) for t in (owned.divide(x, d), (x.double() / d.double()).float()))
    # the quotient in float64, rounded again, is the correctly rounded fp32 quotient wherever that is normal
    differ = (raw(y) != raw(want)) & (want.abs() >= 2.0**-126)
    print(f"divide: {int(differ.sum())} of {x.numel()} differ")
    sample = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(2)).int()
    for fast, definition in list(functions.values())[:3]:
        cpu = definition(sample.view(torch.float32))
        wrong += int((raw(fast(sample.cuda().view(torch.float32)).cpu()) != raw(cpu)).any())
    print(f"primitives: {wrong} wrong")
    return wrong + int(differ.any())


def main(path: str) -> None:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    metadata = {
        "card": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__,
        "cuda": str(torch.version.cuda), "triton": triton.__version__, "recipe": "recipes/sm90_vectors.py",
    }  # fmt: skip
    print(metadata)
    save: dict[str, torch.Tensor] = {}
    wrong = dot_products(save)
    save_file(save, path, metadata)
    wrong += primitives()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main(sys.argv[1])
