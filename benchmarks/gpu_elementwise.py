"""RMSNorm, rotary and SwiGLU beside vLLM's kernels and torch's, at Qwen3-8B's sizes.

`python benchmarks/gpu_elementwise.py --commit HASH [--vllm PATH]` on a machine with a GPU; PATH is the file
`vllm/_C_stable_libtorch.abi3.so` of a vLLM wheel. Inputs rotate through more memory than the L2 cache holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from gpu_timing import in_turn, origin
from results import save
from torch import Tensor

from samebits.ops.rms_norm import add_rms_norm, rms_norm
from samebits.ops.rms_norm import triton as norm_kernels
from samebits.ops.rotary import rotary, rotary_table
from samebits.ops.swiglu import swiglu
from samebits.ops.swiglu import triton as swiglu_kernels

HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE = 4096, 32, 8, 128, 12288
ROWS = (1, 8, 64, 512, 8192)
CACHE_BYTES = 2e8
Call = Callable[[int], object]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def copies_of(rows: int, width: int) -> list[Tensor]:
    """Inputs [rows, width], enough of them (up to 16) that none is still in the cache when its turn comes again."""
    return [randn(rows, width) for _ in range(max(1, min(16, int(CACHE_BYTES / (2 * rows * width)))))]


def cases(rows: int, vllm: bool) -> Iterator[tuple[str, str, dict[str, Call]]]:
    """(operation, width in words, what runs under each name)."""
    native = torch.ops._C
    x, weight = copies_of(rows, HIDDEN), randn(HIDDEN)
    residual, y, n = randn(rows, HIDDEN), torch.empty_like(x[0]), len(x)
    sides: dict[str, Call] = {
        "ours": lambda i: rms_norm(x[i % n], weight, 1e-6),
        "torch": lambda i: torch.nn.functional.rms_norm(x[i % n], (HIDDEN,), weight, 1e-6),
    }
    if vllm:
        sides["vLLM"] = lambda i: native.rms_norm(y, x[i % n], weight, 1e-6)
    yield "RMSNorm", f"{rows} x {HIDDEN}", sides

    def plain(i: int) -> Tensor:
        residual.add_(x[i % n])
        return torch.nn.functional.rms_norm(residual, (HIDDEN,), weight, 1e-6)

    sides = {"ours": lambda i: add_rms_norm(x[i % n], residual, weight, 1e-6), "torch": plain}
    if vllm:
        sides["vLLM"] = lambda i: native.fused_add_rms_norm(x[i % n], residual, weight, 1e-6)
    yield "add + RMSNorm", f"{rows} x {HIDDEN}", sides

    q, small = copies_of(rows * HEADS, DIM), randn(DIM)
    z, nq = torch.empty_like(q[0]), len(q)
    sides = {
        "ours": lambda i: rms_norm(q[i % nq], small, 1e-6),
        "torch": lambda i: torch.nn.functional.rms_norm(q[i % nq], (DIM,), small, 1e-6),
    }
    if vllm:
        sides["vLLM"] = lambda i: native.rms_norm(z, q[i % nq], small, 1e-6)
    yield "QK-norm", f"{rows * HEADS} x {DIM}", sides

    cos, sin = (t.cuda() for t in rotary_table(DIM, 1e6, 8192))
    both = torch.cat([cos, sin], dim=1).bfloat16()
    positions = torch.randint(0, 8192, (rows,), device="cuda")
    heads = [t.view(rows, HEADS, DIM) for t in q]
    key = randn(rows, KV_HEADS, DIM)
    c, s = (t[positions][:, None].bfloat16() for t in (cos, sin))

    def turned(t: Tensor) -> Tensor:
        left, right = t.chunk(2, dim=-1)
        return torch.cat([left * c - right * s, right * c + left * s], dim=-1)

    sides = {
        "ours": lambda i: (rotary(heads[i % nq], positions, cos, sin), rotary(key, positions, cos, sin)),
        "torch": lambda i: (turned(heads[i % nq]), turned(key)),
    }
    if vllm:
        sides["vLLM"] = lambda i: native.rotary_embedding(
            positions, q[i % nq].view(rows, -1), key.view(rows, -1), DIM, both, True
        )
    yield "rotary of q and k", f"{rows} x {HEADS + KV_HEADS} x {DIM}", sides

    wide = copies_of(rows, 2 * INTERMEDIATE)
    product, nw = torch.empty(rows, INTERMEDIATE, device="cuda", dtype=torch.bfloat16), len(wide)

    def silu(i: int) -> Tensor:
        gate, up = wide[i % nw].chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    sides = {"ours": lambda i: swiglu(wide[i % nw]), "torch": silu}
    if vllm:
        sides["vLLM"] = lambda i: native.silu_and_mul(product, wide[i % nw])
    yield "SwiGLU", f"{rows} x {INTERMEDIATE}", sides


def norm_backward(what: str, rows: int, width: int) -> dict[str, object]:
    x, dy, weight = randn(rows, width), randn(rows, width), randn(width)
    scale = norm_kernels.forward(x, None, weight, 1e-6)[2]
    dw = torch.zeros(width, device="cuda")
    plain = torch.ops.aten._fused_rms_norm_backward
    rstd, wants = scale[:, None], [True, True]
    sides: dict[str, Call] = {
        "ours": lambda _: norm_kernels.backward(dy, x, weight, scale, None, dw),
        "torch": lambda _: plain(dy, x, [width], rstd, weight, wants),
    }
    return record(what, f"{rows} x {width}", "torch", in_turn(sides, calls=3, repeats=9))


def swiglu_backward(rows: int) -> dict[str, object]:
    """The backward kernel alone; torch has no single kernel beside it."""
    gate_up, up = randn(rows, 2 * INTERMEDIATE), randn(rows, INTERMEDIATE)

    def silu_backward(_: int) -> tuple[Tensor, Tensor]:
        gate, other = gate_up.chunk(2, dim=-1)
        return torch.ops.aten.silu_backward(up * other, gate), up * torch.nn.functional.silu(gate)

    times = in_turn(
        {"ours": lambda _: swiglu_kernels.backward(up, gate_up), "torch": silu_backward}, calls=3, repeats=9
    )
    return record("SwiGLU backward", f"{rows} x {INTERMEDIATE}", "torch", times)


def record(what: str, shape: str, peer: str, times: dict[str, float]) -> dict[str, object]:
    ours, theirs = times["ours"], times[peer]
    return {"what": what, "shape": shape, "peer": peer, "samebits_s": ours, "peer_s": theirs, "ratio": theirs / ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--vllm")
    arguments = parser.parse_args()
    if arguments.vllm:
        torch.ops.load_library(arguments.vllm)
    torch.manual_seed(0)
    records = []
    for rows in ROWS:
        for what, shape, sides in cases(rows, bool(arguments.vllm)):
            times = in_turn(sides, calls=16 if rows <= 512 else 3, repeats=9)
            records += [record(what, shape, peer, times) for peer in sides if peer != "ours"]
    save("gpu_elementwise", {"origin": origin(arguments.commit), "records": records})
    records += [norm_backward("RMSNorm backward", rows, HIDDEN) for rows in (2048, 8192)]
    records += [norm_backward("QK-norm backward", rows, DIM) for rows in (65536, 131072)]
    records.append(swiglu_backward(8192))
    save("gpu_elementwise", {"origin": origin(arguments.commit), "records": records})
    for r in records:
        print(r["what"], r["shape"], r["peer"], f"{r['samebits_s']:.3g} s", f"ratio {r['ratio']:.2f}", sep=", ")


if __name__ == "__main__":
    main()
