"""report.html: the verdict first, then the curves, the routes and the contract behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from samebits.contract import BEHAVIOURS
from samebits.contract.routes import MODULES
from samebits.evidence.speed import Speed, speed
from samebits.evidence.store import LOCATE, LOCATED, MANIFEST, REPORT, ROUTES, TIMELINE, write_whole
from samebits.evidence.verdict import Verdict
from samebits.evidence.verify import Verification, check_timeline, verify
from samebits.report.charts import bar_chart, line_chart, lines_chart, number, stacked_chart
from samebits.report.located import located_section
from samebits.report.parts import KINDS, card, document, legend, object_of, table
from samebits.report.series import PHASES, Series, collect, trailing_median
from samebits.report.topology import topology
from samebits.report.worst import WorstToken, worst_tokens
from samebits.timeline.events import parse_json
from samebits.timeline.ledger import read


def write_report(run: Path, found: Verification | None = None, page: Path | None = None) -> Path:
    """Writes `page`, or report.html into the run directory, sealed or not, and returns its path.

    The verdict on the page is that of `verify`, made now unless `found` is given. Raises ValueError when
    the directory holds no run, OSError when the page cannot be written.
    """
    check_timeline(run)
    found = found or verify(run)
    events = read(run / TIMELINE).events
    manifest = read_object(run / MANIFEST)
    routes = [read_object(path) for path in sorted((run / ROUTES).glob("*.json"))]
    page = page or run / REPORT
    located = read_object(run / LOCATE / LOCATED)
    # Sidecars are shown only after `verify` has read them all.
    worst = [] if found.problems else worst_tokens(run, found.totals["steps"], manifest)
    name = run.resolve().name
    text = render(name, found, collect(events), manifest, routes, located, worst, speed(events))
    write_whole(page, text.encode())
    return page


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of the run, or an empty one when it is missing or damaged: `verify` says so on the page."""
    try:
        record = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return object_of(record)


def render(
    name: str,
    found: Verification,
    series: Series,
    manifest: Mapping[str, Any],
    routes: Sequence[Mapping[str, Any]],
    located: Mapping[str, Any],
    worst: Sequence[WorstToken] = (),
    warm: Speed | None = None,
) -> str:
    """The whole page as text."""
    parts = [
        f"<h1>samebits · {escape(name)} · case {escape(str(found.totals.get('case', '')))}</h1>",
        _verdict(found),
        _tiles(found.totals, warm),
        located_section(located),
        _charts(series),
        _steps(series),
        _worst(worst),
        _topology(manifest),
        _routes(routes),
        _contract(manifest),
        _settings(manifest),
    ]
    return document(f"{found.verdict.value} · {name}", parts)


def _verdict(found: Verification) -> str:
    totals = found.totals
    tokens, wrong = number(totals.get("compared_tokens", 0)), number(totals.get("mismatch_count", 0))
    title, text = {
        Verdict.SAME: ("Same bits", f"All {tokens} compared log-probabilities are the same 32 bits."),
        Verdict.DIFFERENT: (
            "Different",
            f"{wrong} of {tokens} compared log-probabilities differ, in "
            f"{totals.get('steps_with_mismatch')} of {totals.get('steps')} steps. "
            f"The worst: {totals.get('worst')} (step/prompt/sample@token).",
        ),
        Verdict.CANNOT_TELL: ("Cannot tell", "; ".join(found.problems)),
    }[found.verdict]
    lines = [text, f"Sampling: {found.sampling}."] if found.sampling else [text]
    body = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<section class="verdict {KINDS[found.verdict]}"><strong>{title}</strong>{body}</section>'


def _tiles(totals: Mapping[str, Any], warm: Speed | None) -> str:
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
    if warm is not None and warm.steps:
        shown.append((f"tokens/s without the first {warm.warm_up} steps", f"{warm.tokens_per_second:.0f}"))
    tiles = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b></div>' for label, value in shown
    )
    return f'<div class="tiles">{tiles}</div>'


def _charts(series: Series) -> str:
    cards = []
    bars = ((name, series.points(name)) for name in ("mismatch_count", "max_abs_diff"))
    cards += [card(f"{name} per step", bar_chart(points), _say_zero(points)) for name, points in bars if points]
    lines = (
        ("Reward", series.points("reward"), True, None),
        ("Held-out accuracy", list(series.accuracy), True, 1.0),
        ("KL to the reference model", series.points("kl"), True, None),
        ("Gradient norm", series.points("grad_norm"), True, None),
        ("KL between rollout and trainer (k3)", series.points("kl_k3"), True, None),
        ("99th percentile of abs dlogp", series.points("logp_abs_diff_p99"), True, None),
        ("Clip fraction by drift alone", series.points("clip_fraction"), True, None),
        ("Response length, tokens", series.points("response_length"), True, None),
        ("Generated tokens per second", series.points("tokens_per_second"), True, None),
    )
    cards += [
        card(title, line_chart(points, zero=zero, top=top), f"last {number(points[-1][1])}")
        for title, points, zero, top in lines
        if points
    ]
    loss = series.points("loss")
    if loss:
        chart = lines_chart([loss, trailing_median(loss)], zero=False)
        below = legend([("raw", "line"), ("trailing median of 9", "p2")])
        cards.append(card("Loss", chart, f"last {number(loss[-1][1])}", below))
    drawn = dict(series.points("seconds"))
    stacked = [
        (step.number, [(phase, step.phases.get(phase, 0.0)) for phase in PHASES])
        for step in series.steps
        if step.phases and step.number in drawn
    ]
    if stacked:
        last = f"last {number(sum(value for _, value in stacked[-1][1]))} s"
        below = legend([(phase, f"p{at}") for at, phase in enumerate(PHASES)])
        cards.append(card("Seconds per step", stacked_chart(stacked), last, below))
    if not cards:
        return "<p>No step was recorded.</p>"
    return f'<h2>Steps</h2><div class="cards">{"".join(cards)}</div>'


def _say_zero(points: Sequence[tuple[int, float]]) -> str:
    high = max(value for _, value in points)
    return "0 in every step" if high == 0 else f"at most {number(high)}"


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
    return f"<details><summary>All steps as a table</summary>{table(head, rows, range(2, 9))}</details>"


def _worst(worst: Sequence[WorstToken]) -> str:
    if not worst:
        return ""
    rows = [
        [
            f"<code>{escape(one.where)}</code>",
            f"<code>{escape(repr(one.before)[1:-1])}<mark>{escape(repr(one.token)[1:-1])}</mark></code>",
            f"{one.rollout:.6g} <code>{one.bits[0]:08x}</code>",
            f"{one.trainer:.6g} <code>{one.bits[1]:08x}</code>",
            number(one.difference) if one.difference < math.inf else "not a number",
        ]
        for one in worst
    ]
    head = ("step/prompt/sample@token", "text and token", "rollout logp", "trainer logp", "difference")
    return f"<h2>Worst tokens</h2>{table(head, rows, (4,))}"


def _topology(manifest: Mapping[str, Any]) -> str:
    config = object_of(manifest.get("config"))
    picture = topology(config) if config else ""
    return f'<h2>Topology</h2><div class="card">{picture}</div>' if picture else ""


def _routes(routes: Sequence[Mapping[str, Any]]) -> str:
    if not routes:
        return "<h2>Routes</h2><p>No route record: the run did not come to its end.</p>"
    rows, details = [], []
    for record in routes:
        process = f"{record.get('role', '?')} {record.get('engine', '') if record.get('role') == 'rollout' else ''}"
        process = f"{process.strip()} rank {record.get('rank', '?')}"
        modules = {name: one for name, one in object_of(record.get("modules")).items() if isinstance(one, dict)}
        groups = [_group(modules, group) for group in MODULES]
        calls = sum(count for count in object_of(record.get("counters")).values() if isinstance(count, int))
        contract = f"<code>{escape(str(record.get('contract', ''))[:12])}</code>"
        rows.append([escape(process), *groups, number(min(abs(calls), 1 << 63)), contract])
        details += [_module_row(process, name, module) for name, module in sorted(modules.items())]
    head = ("process", *MODULES, "kernel calls", "contract")
    every = table(("process", "module", "group", "route", "computed by", "calls"), details, (5,))
    return f"<h2>Routes</h2>{table(head, rows, (4,))}<details><summary>Every module</summary>{every}</details>"


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
    contract = object_of(manifest.get("contract"))
    content = object_of(contract.get("content"))
    if not content:
        return ""
    text = f"arithmetic {content.get('arithmetic')}, K segments of row-parallel layers: {content.get('segments')}"
    rows = [
        [f"<b>{escape(name)}@{escape(str(data.get('version')))}</b>"]
        + [escape(str(data.get(behaviour, ""))) for behaviour in (*BEHAVIOURS, "specials")]
        for name, data in object_of(content.get("boundaries")).items()
        if isinstance(data, dict)
    ]
    columns = ("boundary", *BEHAVIOURS, "special values")
    return (
        f"<h2>Contract</h2><p><code>{escape(str(contract.get('digest')))}</code><br>{escape(text)}</p>"
        f"<details><summary>Its boundaries</summary>{table(columns, rows)}</details>"
    )


def _settings(manifest: Mapping[str, Any]) -> str:
    sections = []
    for title, key in (("Settings", "config"), ("Packages", "packages"), ("Machine", "platform")):
        values = object_of(manifest.get(key))
        if values:
            rows = [[escape(name), f"<code>{escape(str(value))}</code>"] for name, value in values.items()]
            sections.append(f"<details><summary>{title}</summary>{table(('name', 'value'), rows)}</details>")
    return f"<h2>Run</h2>{''.join(sections)}" if sections else ""
