"""RMSNorm and add + RMSNorm of 4096 columns under several launches, beside vLLM's kernels.

`python benchmarks/gpu_norm_launches.py --commit HASH --vllm PATH` on a machine with a GPU; PATH is the file
`vllm/_C_stable_libtorch.abi3.so` of a vLLM wheel. Inputs rotate through more memory than the L2 cache holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from gpu_elementwise import HIDDEN, ROWS, copies_of, randn, record
from gpu_timing import in_turn, origin
from results import save

from samebits.ops.rms_norm import triton as kernels
from samebits.ops.rms_norm.launch import Launch

LAUNCHES = (Launch(1, 2), Launch(1, 4, shared=True), Launch(1, 8, shared=True), Launch(1, 16, shared=True))


def records(rows: int, add: bool) -> Iterator[dict[str, object]]:
    """One record for each launch, all measured in turn with vLLM's kernel."""
    native = torch.ops._C
    x, weight, residual = copies_of(rows, HIDDEN), randn(HIDDEN), randn(rows, HIDDEN)
    y, n, other = torch.empty_like(residual), len(x), residual if add else None
    sides: dict[str, Callable[[int], object]] = {
        str(how): lambda i, how=how: kernels.forward(x[i % n], other, weight, 1e-6, how)  # type: ignore[misc]
        for how in LAUNCHES
    }
    if add:
        sides["vLLM"] = lambda i: native.fused_add_rms_norm(x[i % n], residual, weight, 1e-6)
    else:
        sides["vLLM"] = lambda i: native.rms_norm(y, x[i % n], weight, 1e-6)
    times = in_turn(sides, calls=16 if rows <= 512 else 3, repeats=9)
    for how in LAUNCHES:
        pair = {"ours": times[str(how)], "vLLM": times["vLLM"]}
        what = "add + RMSNorm" if add else "RMSNorm"
        yield {**record(what, f"{rows} x {HIDDEN}", "vLLM", pair), "launch": str(how)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--vllm", required=True)
    arguments = parser.parse_args()
    torch.ops.load_library(arguments.vllm)
    torch.manual_seed(0)
    found = [entry for rows in ROWS for add in (False, True) for entry in records(rows, add)]
    save("gpu_norm_launches", {"origin": origin(arguments.commit), "records": found})
    for r in found:
        print(r["what"], r["shape"], r["launch"], f"{r['samebits_s']:.3g} s", f"ratio {r['ratio']:.2f}", sep=", ")


if __name__ == "__main__":
    main()
