"""The linear map beside torch.mm, at the shapes of Qwen3-8B split over 1, 2, 4 and 8 ranks.

`python benchmarks/gpu_linear.py --commit HASH` on a machine with a GPU. Weights rotate through more memory than the
L2 cache holds. `own` is this project's kernel; `samebits` is what a run takes: the vendor's product where a
certificate exists and it is the faster one (samebits.ops.linear.vendor), else the own kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from gpu_timing import in_turn, origin
from results import save

from samebits.backends import device_arithmetic
from samebits.ops.linear import triton as own
from samebits.ops.linear import vendor
from samebits.ops.linear.launch import launch, vendor_is_faster

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HIDDEN, QKV, INTERMEDIATE = 4096, 6144, 12288
CACHE_BYTES = 2e8


def shapes() -> Iterator[tuple[str, int, int, int]]:
    """(name, ranks, outputs, width) of each weight that a rank holds."""
    for ranks in (1, 2, 4, 8):
        yield "qkv", ranks, QKV // ranks, HIDDEN
        yield "o", ranks, HIDDEN, HIDDEN // ranks
        yield "gate_up", ranks, 2 * INTERMEDIATE // ranks, HIDDEN
        yield "down", ranks, HIDDEN, INTERMEDIATE // ranks


def measure(name: str, ranks: int, m: int, n: int, k: int) -> dict[str, object]:
    """One record."""
    device, arithmetic = torch.device("cuda", 0), device_arithmetic(torch.device("cuda", 0))
    copies = 1 + int(CACHE_BYTES / (2 * n * k))
    weights = [torch.randn(n, k, device=device).bfloat16() for _ in range(copies)]
    x = torch.randn(m, k, device=device).bfloat16()
    y = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    certified = vendor_is_faster(m, n, k) and vendor.certify(m, n, k, device) is not None
    functions = {
        "own": lambda call: own.matmul(x, weights[call % copies], y, arithmetic),
        "torch": lambda call: torch.mm(x, weights[call % copies].t(), out=y),
    }
    if certified:
        functions["samebits"] = lambda call: vendor.product(x, weights[call % copies], y)
    times = in_turn(functions, calls=max(copies, 3), repeats=9 if m <= 1024 else 5)
    ours = times.get("samebits", times["own"])
    return {
        "what": f"linear {name} TP{ranks}", "shape": f"M={m} N={n} K={k}", "m": m, "n": n, "k": k, "peer": "torch.mm",
        "samebits_s": ours, "own_s": times["own"], "peer_s": times["torch"], "ratio": times["torch"] / ours,
        "own_ratio": times["torch"] / times["own"], "certified": certified, "launch": launch(m, n, k).name,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    commit = parser.parse_args().commit
    records, seen = [], set()
    for name, ranks, n, k in shapes():
        for m in ROWS:
            if (m, n, k) not in seen:
                seen.add((m, n, k))
                records.append(measure(name, ranks, m, n, k))
    save("gpu_linear", {"origin": origin(commit), "records": records})
    for m in ROWS:
        row = [r for r in records if r["m"] == m]
        print(f"M={m}: " + " ".join(f"{r['ratio']:.2f}" for r in row))


if __name__ == "__main__":
    main()
