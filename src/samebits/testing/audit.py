"""Compile every Triton kernel for NVIDIA and AMD, without a GPU, and look at the generated code.

`python -m samebits.testing.audit [--json FILE]` prints a table and exits with 1 when a kernel breaks a rule: matrix
instructions other than those that the arithmetic names (or any, where no product is asked for), approximate
functions, a fused multiply-add that nobody wrote, flushed subnormals, floating-point atomics, spilled registers, more
shared memory than the card has. Each module of MODULES lists its kernels in KERNELS, each as
(name, kernel, types of its arguments, constants, options); arguments without a type are constants, None where not
given. Options: num_warps, num_stages, `targets` ("cuda" or "hip": only there), `divisible` (sizes that are multiples
of 16), `spills_allowed` (targets on which it isn't hot).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samebits.testing.generated_code import Code, violations

OPS = ("attention", "embedding", "linear", "logprob", "rms_norm", "rotary", "sample", "sample_support", "swiglu")
# what a kernel is listed under -> the module that lists it
MODULES = {
    **{op: f"samebits.ops.{op}.triton" for op in OPS},
    "collectives": "samebits.collectives.triton",
    "gradient_norm": "samebits.into_megatron.norm_kernel",
    "weights": "samebits.bits.sha256_triton",
}
TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64)}


@dataclass(frozen=True)
class Finding:
    """What was found in one kernel compiled for one target; `broken` lists the rules that it breaks."""

    kernel: str
    target: str
    matrix: list[str]
    registers: int
    spills: int
    shared_bytes: int
    broken: list[str]


def kernels() -> Iterator[tuple[str, int]]:
    """(a name of MODULES, position in its KERNELS) of every kernel."""
    for name, path in MODULES.items():
        listed = getattr(importlib.import_module(path), "KERNELS", None)
        if listed is None:
            raise ValueError(f"{path} lists no KERNELS")
        yield from ((name, number) for number in range(len(listed)))


def audit_one(group: str, number: int) -> list[Finding]:
    """The findings about one kernel, one for each target that it has a launch for."""
    name, kernel, types, constants, options = importlib.import_module(MODULES[group]).KERNELS[number]
    wanted = options.get("targets")
    return [
        examine(f"{group}.{name}", kernel, types, constants, options, target)
        for target, (vendor, *_) in TARGETS.items()
        if wanted in (None, vendor)
    ]


def examine(
    name: str, kernel: Any, types: dict[str, str], constants: dict[str, object], options: dict[str, Any], target: str
) -> Finding:
    """Compile one kernel for one target and look at it."""
    code = compile_for(kernel, types, constants, options, target)
    broken = violations(code)
    if target in options.get("spills_allowed", ()):
        broken = [rule for rule in broken if not rule.startswith("spills")]
    return Finding(name, target, sorted(code.matrix), code.registers, code.spills, code.shared_bytes, broken)


def compile_for(
    kernel: Any, types: dict[str, str], constants: dict[str, object], options: dict[str, Any], target: str
) -> Code:
    """The code that the compiler makes for `target`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    vendor = TARGETS[target][0]
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    given = {(names.index(name),): constants.get(name) for name in names if name not in types}
    aligned = [n for n, t in types.items() if t.startswith("*")] + [
        n for n in options.get("divisible", ()) if n in types
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    chosen: dict[str, Any] = {key: options[key] for key in ("num_warps", "num_stages") if key in options}
    chosen["enable_fp_fusion"] = False
    if vendor == "hip":
        chosen |= {"matrix_instr_nonkdim": 16, "num_stages": min(chosen.get("num_stages", 2), 2)}
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(kernel, signature=signature, constexprs=given, attrs=attributes)
    made = compile(source, target=GPUTarget(*TARGETS[target]), options=chosen)
    return Code.of(target, made.asm, made.metadata.shared)


def run(jobs: Sequence[tuple[str, int]], processes: int) -> list[Finding]:
    """The findings about all jobs, in their order."""
    with ProcessPoolExecutor(processes) as pool:
        return [finding for found in pool.map(audit_one, *zip(*jobs, strict=True)) for finding in found]


def table(findings: Sequence[Finding]) -> Table:
    """One row for each kernel and target."""
    out = Table("kernel", "target", "matrix instructions", "registers", "spills", "shared", "rules broken")
    for f in findings:
        row = (f.kernel, f.target, " ".join(f.matrix) or "none", str(f.registers), str(f.spills), str(f.shared_bytes))
        out.add_row(*row, "; ".join(f.broken) or "-", style="red" if f.broken else None)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="samebits.testing.audit", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the findings go as JSON")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("audit: Triton is not importable here; `make audit` installs it beside this environment", file=sys.stderr)
        return 2
    findings = run(list(kernels()), options.processes)
    Console(width=None if sys.stdout.isatty() else 200).print(table(findings))
    broken = [f for f in findings if f.broken]
    print(f"{len(findings)} compiled, {len(broken)} with broken rules")
    if options.json:
        import triton

        data = {"triton": triton.__version__, "findings": [asdict(f) for f in findings]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
