"""report.html: the verdict first, then the curves, the routes and the contract behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from samebits.evidence.store import LOCATE, MANIFEST, REPORT, ROUTES, TIMELINE
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import Verification, verify
from samebits.report.charts import bar_chart, line_chart, number, stacked_chart
from samebits.report.located import located_section
from samebits.report.series import PHASES, Series, collect
from samebits.report.style import SCRIPT, STYLE
from samebits.timeline.events import parse_json
from samebits.timeline.ledger import read

BEHAVIOURS = ("dependency", "partition", "merge", "precision", "rounding", "primitives")


def write_report(run: Path, found: Verification | None = None) -> Path:
    """Writes report.html into a run directory, sealed or not, and returns its path.

    The verdict on the page is that of `verify`, made now unless `found` is given. Raises ValueError when
    the directory holds no run, OSError when the page cannot be written.
    """
    if not (run / TIMELINE).is_file():
        raise ValueError(f"{run} holds no run: {TIMELINE} is missing")
    found = found or verify(run)
    series = collect(read(run / TIMELINE).events)
    manifest = _object(run / MANIFEST)
    routes = [_object(path) for path in sorted((run / ROUTES).glob("*.json"))]
    page = run / REPORT
    located = _object(run / LOCATE / "located.json")
    page.write_text(render(run.resolve().name, found, series, manifest, routes, located), encoding="utf-8")
    return page


def _object(path: Path) -> dict[str, Any]:
    """A JSON object of the run, or an empty one when it is missing or damaged: `verify` says so on the page."""
    try:
        record = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def render(
    name: str,
    found: Verification,
    series: Series,
    manifest: Mapping[str, Any],
    routes: Sequence[Mapping[str, Any]],
    located: Mapping[str, Any],
) -> str:
    """The whole page as text."""
    parts = [
        f"<h1>samebits · {escape(name)} · case {escape(str(found.totals.get('case', '')))}</h1>",
        _verdict(found),
        _tiles(found.totals),
        located_section(located),
        _charts(series),
        _steps(series),
        _routes(routes),
        _contract(manifest),
        _settings(manifest),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(found.verdict.value)} · {escape(name)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _verdict(found: Verification) -> str:
    totals = found.totals
    tokens, wrong = number(totals.get("compared_tokens", 0)), number(totals.get("mismatch_count", 0))
    title, kind, text = {
        Verdict.SAME: ("Same bits", "same", f"All {tokens} compared log-probabilities are the same 32 bits."),
        Verdict.DIFFERENT: (
            "Different",
            "different",
            f"{wrong} of {tokens} compared log-probabilities differ, in "
            f"{totals.get('steps_with_mismatch')} of {totals.get('steps')} steps. "
            f"The worst: {totals.get('worst')} (step/prompt/sample@token).",
        ),
        Verdict.CANNOT_TELL: ("Cannot tell", "unsure", "; ".join(found.problems)),
    }[found.verdict]
    return f'<section class="verdict {kind}"><strong>{title}</strong><p>{escape(text)}</p></section>'


def _tiles(totals: Mapping[str, Any]) -> str:
    shown: list[tuple[str, str]] = [
        (name, number(totals[key]))
        for name, key in (
            ("mismatch_count", "mismatch_count"),
            ("max_abs_diff", "max_abs_diff"),
            ("mean_abs_diff", "mean_abs_diff"),
            ("compared tokens", "compared_tokens"),
            ("steps", "steps"),
        )
        if key in totals
    ]
    if totals.get("last_accuracy") is not None:
        label = f"held-out accuracy, from {totals['first_accuracy']:.3f}"
        shown.append((label, f"{totals['last_accuracy']:.3f}"))
    if "tokens_per_second" in totals:
        shown.append(("generated tokens/s", f"{totals['tokens_per_second']:.0f}"))
        shown.append(("seconds per step", f"{totals['seconds_per_step']:.2f}"))
    tiles = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b></div>' for label, value in shown
    )
    return f'<div class="tiles">{tiles}</div>'


def _charts(series: Series) -> str:
    cards = []
    mismatches, differences = series.points("mismatch_count"), series.points("max_abs_diff")
    if mismatches:
        cards.append(_card("mismatch_count per step", bar_chart(mismatches), _say_zero(mismatches)))
        cards.append(_card("max_abs_diff per step", bar_chart(differences), _say_zero(differences)))
    lines = (
        ("Reward", series.points("reward"), True, None),
        ("Held-out accuracy", list(series.accuracy), True, 1.0),
        ("KL to the reference model", series.points("kl"), True, None),
        ("Gradient norm", series.points("grad_norm"), True, None),
        ("Loss", series.points("loss"), False, None),
        ("Response length, tokens", series.points("response_length"), True, None),
        ("Generated tokens per second", series.points("tokens_per_second"), True, None),
    )
    cards += [
        _card(title, line_chart(points, zero=zero, top=top), f"last {number(points[-1][1])}")
        for title, points, zero, top in lines
        if points
    ]
    stacked = [
        (step.number, [(phase, step.phases.get(phase, 0.0)) for phase in PHASES])
        for step in series.steps
        if step.phases
    ]
    if stacked:
        legend = "".join(
            f'<span><i style="background: var(--p{at})"></i>{phase}</span>' for at, phase in enumerate(PHASES)
        )
        last = f"last {number(sum(value for _, value in stacked[-1][1]))} s"
        cards.append(_card("Seconds per step", stacked_chart(stacked), last, f'<div class="legend">{legend}</div>'))
    if not cards:
        return "<p>No step was recorded.</p>"
    return f'<h2>Steps</h2><div class="cards">{"".join(cards)}</div>'


def _say_zero(points: Sequence[tuple[int, float]]) -> str:
    high = max(value for _, value in points)
    return "0 in every step" if high == 0 else f"at most {number(high)}"


def _card(title: str, chart: str, note: str, below: str = "") -> str:
    return (
        f'<figure class="card" style="margin:0"><header><h3>{escape(title)}</h3></header>'
        f'<p class="read">{escape(note)}</p>{chart}{below}</figure>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already."""

    def cell(tag: str, at: int, text: str) -> str:
        kind = ' class="num"' if at in numeric else ' class="wrap"' if len(text) > 60 else ""
        return f"<{tag}{kind}>{text}</{tag}>"

    header = "".join(cell("th", at, escape(text)) for at, text in enumerate(head))
    body = "".join("<tr>" + "".join(cell("td", at, text) for at, text in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{header}</tr>{body}</table></div>'


def _steps(series: Series) -> str:
    names = ("compared_tokens", "mismatch_count", "max_abs_diff", "reward", "kl", "grad_norm", "seconds")
    rows = [
        [
            str(step.number),
            f"<code>{escape(step.version)}</code>",
            *(number(step.values[name]) if name in step.values else "" for name in names),
            escape(step.worst),
        ]
        for step in series.steps
    ]
    if not rows:
        return ""
    head = ("step", "weights", *names, "worst token")
    return f"<details><summary>All steps as a table</summary>{_table(head, rows, range(2, 9))}</details>"


def _routes(routes: Sequence[Mapping[str, Any]]) -> str:
    if not routes:
        return "<h2>Routes</h2><p>No route record: the run did not come to its end.</p>"
    rows, details = [], []
    for record in routes:
        process = f"{record.get('role', '?')} {record.get('engine', '') if record.get('role') == 'rollout' else ''}"
        process = f"{process.strip()} rank {record.get('rank', '?')}"
        modules = record.get("modules")
        modules = modules if isinstance(modules, dict) else {}
        groups = [_group(modules, group) for group in ("attention", "ffn", "logp")]
        counters = record.get("counters")
        calls = sum(counters.values()) if isinstance(counters, dict) else 0
        contract = f"<code>{escape(str(record.get('contract', ''))[:12])}</code>"
        rows.append([escape(process), *groups, number(calls), contract])
        details += [_module_row(process, name, module) for name, module in sorted(modules.items())]
    head = ("process", "attention", "ffn", "logp", "kernel calls", "contract")
    every = _table(("process", "module", "group", "route", "computed by", "calls"), details, (5,))
    return f"<h2>Routes</h2>{_table(head, rows, (4,))}<details><summary>Every module</summary>{every}</details>"


def _group(modules: Mapping[str, Any], group: str) -> str:
    routes = {str(module.get("route")) for module in modules.values() if module.get("group") == group}
    return " ".join(_route(route) for route in sorted(routes)) or "none"


def _route(route: str) -> str:
    words = {"R": "R samebits", "P": "P native"}
    kind = route if route in words else ""
    return f'<span class="route {kind}">{escape(words.get(route, route))}</span>'


def _module_row(process: str, name: str, module: Mapping[str, Any]) -> list[str]:
    code = str(module.get("implementation") or module.get("class") or module.get("backend") or "")
    return [
        escape(process),
        f"<code>{escape(name)}</code>",
        escape(str(module.get("group", ""))),
        _route(str(module.get("route", ""))),
        f"<code>{escape(code)}</code>",
        escape(str(module.get("calls", ""))),
    ]


def _contract(manifest: Mapping[str, Any]) -> str:
    contract = manifest.get("contract")
    if not isinstance(contract, dict) or not isinstance(contract.get("content"), dict):
        return ""
    content = contract["content"]
    text = f"arithmetic {content.get('arithmetic')}, K segments of row-parallel layers: {content.get('segments')}"
    boundaries = content.get("boundaries")
    rows = [
        [f"<b>{escape(name)}@{escape(str(data.get('version')))}</b>"]
        + [escape(str(data.get(behaviour, ""))) for behaviour in BEHAVIOURS]
        for name, data in (boundaries if isinstance(boundaries, dict) else {}).items()
    ]
    return (
        f"<h2>Contract</h2><p><code>{escape(str(contract.get('digest')))}</code><br>{escape(text)}</p>"
        f"<details><summary>Its boundaries</summary>{_table(('boundary', *BEHAVIOURS), rows)}</details>"
    )


def _settings(manifest: Mapping[str, Any]) -> str:
    sections = []
    for title, key in (("Settings", "config"), ("Packages", "packages"), ("Machine", "platform")):
        values = manifest.get(key)
        if isinstance(values, dict):
            rows = [[escape(name), f"<code>{escape(str(value))}</code>"] for name, value in values.items()]
            sections.append(f"<details><summary>{title}</summary>{_table(('name', 'value'), rows)}</details>")
    return f"<h2>Run</h2>{''.join(sections)}" if sections else ""
