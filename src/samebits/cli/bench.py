"""`samebits bench cpu`: the operators beside PyTorch's own, as a table, JSON records and a plot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer

from samebits import env


def bench_command(threads: int, seconds: float, only: str, out: Path | None, matrix_unit: bool, show_list: bool) -> int:
    """Measures what contains `only`, prints each line as it comes, and writes OUT.json and OUT.svg if asked."""
    if not matrix_unit:  # torch takes its products from either library: SDPA's stay on the unit if one may use it
        env.export({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3"})
    if out is not None:  # before minutes of measuring
        if not out.name:
            typer.echo(
                f"error: --out {out} is a folder; give the name of its files too, such as {out / 'cpu'}", err=True
            )
            return 2
        out.parent.mkdir(parents=True, exist_ok=True)
    from samebits.bench.cpu import measure, works
    from samebits.bench.plot import ratio_plot
    from samebits.bench.record import provenance

    threads = threads or len(os.sched_getaffinity(0))
    chosen = (work for work in works(threads) if only in str(work))
    if show_list:
        for work in chosen:
            typer.echo(str(work))
        return 0
    records = []
    for work in chosen:
        record = measure(work, seconds)
        records.append(record.as_data())
        goal = "" if record.goal is None else f", goal {record.goal:g}: {'missed' if record.missed else 'met'}"
        typer.echo(f"{record.ratio:6.2f}x  {work}{goal}")
        if record.reason:
            typer.echo(f"         {record.reason}")
    if not records:
        typer.echo(f"error: no comparison contains {only!r}; see --list", err=True)
        return 2
    if out is not None:
        about = {"what": "CPU operators beside PyTorch's own", **provenance(), "threads": threads}
        about["peer_may_use_matrix_unit"] = matrix_unit
        written, plot = (out.with_name(f"{out.name}.{kind}") for kind in ("json", "svg"))
        written.write_text(json.dumps({**about, "records": records}, indent=1) + "\n", encoding="utf-8")
        plot.write_text(ratio_plot("samebits against PyTorch, CPU, more is better", records), encoding="utf-8")
        typer.echo(f"records: {written}, plot: {plot}")
    return 0
