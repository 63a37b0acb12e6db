"""One page about several runs: verdicts first, then the same quantities over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from samebits.evidence.speed import Speed, equal_length, speed
from samebits.evidence.store import MANIFEST, TIMELINE, write_whole
from samebits.evidence.verify import Verification, check_timeline, verify
from samebits.report.charts import lines_chart, number
from samebits.report.page import read_object
from samebits.report.parts import card, document, legend, table, verdict_box
from samebits.report.series import Series, collect
from samebits.timeline.events import Event
from samebits.timeline.ledger import read

COLOURS = ("line", "p2", "p4", "bad", "p3", "unsure")
CHARTS = (
    ("mismatch_count", "mismatch_count per step"),
    ("max_abs_diff", "max_abs_diff per step"),
    ("logp_abs_diff_p99", "99th percentile of abs dlogp"),
    ("kl_k3", "KL between rollout and trainer (k3)"),
    ("reward", "Reward"),
    ("kl", "KL to the reference model"),
    ("grad_norm", "Gradient norm"),
    ("loss", "Loss"),
    ("tokens_per_second", "Generated tokens per second"),
    ("seconds", "Seconds per step"),
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run of a comparison."""

    name: str
    found: Verification
    events: tuple[Event, ...]
    series: Series
    settings: Mapping[str, Any]
    warm: Speed


def load(paths: Sequence[Path]) -> list[Compared]:
    """The runs, each verified now. Raises ValueError for a path without a run, and for more than six."""
    if len(paths) > len(COLOURS):
        raise ValueError(f"{len(paths)} runs to compare, at most {len(COLOURS)} can be told apart on one page")
    runs, names = [], [path.resolve().name for path in paths]
    for path, name in zip(paths, names, strict=True):
        check_timeline(path)
        events = read(path / TIMELINE).events
        config = read_object(path / MANIFEST).get("config")
        runs.append(
            Compared(
                name=name if names.count(name) == 1 else str(path),
                found=verify(path),
                events=events,
                series=collect(events),
                settings=config if isinstance(config, dict) else {},
                warm=speed(events),
            )
        )
    return runs


def write_comparison(paths: Sequence[Path], out: Path) -> Path:
    """Writes one page about several runs. Raises as `load` does, and OSError."""
    runs = load(paths)
    rows = [[escape(cell) for cell in summary_row(run)] for run in runs]
    parts = [
        f"<h1>samebits · comparison of {len(runs)} runs</h1>",
        *(verdict_box(run.name, run.found.verdict, _sentence(run.found)) for run in runs),
        f"<h2>Side by side</h2>{table(HEADS, rows, range(3, len(HEADS)))}",
        f"<p>{escape(speed_note(runs))}</p>",
        _charts(runs),
        _settings(runs),
    ]
    write_whole(out, document(f"comparison of {', '.join(run.name for run in runs)}", parts).encode())
    return out


HEADS = (
    "run", "case", "verdict", "mismatch_count", "compared tokens", "mean abs dlogp", "max abs dlogp", "KL k3", "reward",
    "accuracy", "tokens/s", "s/step",
)  # fmt: skip


def summary_row(run: Compared) -> list[str]:
    """The run's totals as cells."""
    totals = run.found.totals
    drift = totals.get("drift") or {}
    texts = [run.name, str(totals.get("case", "")), run.found.verdict.value]
    keys = ("mismatch_count", "compared_tokens", "mean_abs_diff", "max_abs_diff")
    values = [*(totals.get(key) for key in keys), drift.get("kl_k3"), totals.get("mean_reward")]
    values += [totals.get("last_accuracy"), run.warm.tokens_per_second, run.warm.seconds_per_step]
    return texts + ["-" if value is None else number(value) for value in values]


def speed_note(runs: Sequence[Compared]) -> str:
    """What the speeds leave out, and the view over steps of about equal length."""
    text = f"Speeds leave out the first {max(run.warm.warm_up for run in runs)} step(s). "
    equal = equal_length([run.events for run in runs])
    if equal is None:
        return text + "No step after these has about the same number of tokens in every run: no equal-length view."
    rates = ", ".join(f"{run.name} {one.tokens_per_second:.0f}" for run, one in zip(runs, equal, strict=True))
    return text + f"Over the {equal[0].steps} step(s) whose token counts agree within 10 %: {rates} tokens/s."


def _sentence(found: Verification) -> str:
    totals = found.totals
    if found.problems:
        return "; ".join(found.problems)
    return f"{totals['mismatch_count']} of {totals['compared_tokens']} log-probabilities differ, case {totals['case']}"


def _charts(runs: Sequence[Compared]) -> str:
    below = legend([(run.name, COLOURS[at]) for at, run in enumerate(runs)])
    cards = []
    for name, title in CHARTS:
        points = [run.series.points(name) for run in runs]
        if all(points):
            last = " / ".join(number(line[-1][1]) for line in points)
            cards.append(card(title, lines_chart(points, zero=name != "loss"), f"last {last}", below))
    accuracy = [list(run.series.accuracy) for run in runs]
    if all(accuracy):
        cards.append(card("Held-out accuracy", lines_chart(accuracy, zero=True), "", below))
    return f'<h2>Steps</h2><div class="cards">{"".join(cards)}</div>' if cards else "<p>No step was recorded.</p>"


def _settings(runs: Sequence[Compared]) -> str:
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "run_dir")
    differing = [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]
    rows = [[escape(key), *(f"<code>{escape(str(run.settings.get(key)))}</code>" for run in runs)] for key in differing]
    if not rows:
        return "<h2>Settings</h2><p>All the same.</p>"
    return f"<h2>Settings that differ</h2>{table(('setting', *(escape(run.name) for run in runs)), rows)}"
