"""Small charts as inline SVG: a line, bars, and stacked bars over steps. Colours are classes of the page's style."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 190
# Below this, a span has no ticks that floats could tell apart.
_TINY = 1e-290
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 24


@dataclass(frozen=True)
class Frame:
    """The plotting area of one chart: which steps and values it spans."""

    first: float
    last: float
    low: float
    high: float
    pad: float = 0.0

    def x(self, step: float) -> float:
        left, right = LEFT + self.pad, WIDTH - RIGHT - self.pad
        if self.last == self.first:
            return (left + right) / 2
        return left + (step - self.first) / (self.last - self.first) * (right - left)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def number(value: float) -> str:
    """A value in few characters: whole numbers as such, others with three or four significant digits."""
    if math.isinf(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}".replace(",", "\u2009")
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.3g}"


def line_chart(points: Sequence[tuple[int, float]], *, zero: bool, top: float | None = None) -> str:
    """A line through (step, value) points, with a dot at each when there are few."""
    frame = _frame(points, zero=zero, top=top)
    path = " ".join(
        f"{'M' if at == 0 else 'L'}{frame.x(step):.1f} {frame.y(value):.1f}" for at, (step, value) in enumerate(points)
    )
    marks = [f'<path class="line" d="{path}"/>']
    if len(points) <= 40:
        marks += [f'<circle class="dot" cx="{frame.x(s):.1f}" cy="{frame.y(v):.1f}" r="2.6"/>' for s, v in points]
    return _chart(frame, marks, [(step, frame.x(step), number(value)) for step, value in points])


def lines_chart(series: Sequence[Sequence[tuple[int, float]]], *, zero: bool) -> str:
    """Several lines over the same steps, in their order: classes series0, series1, ..."""
    every = sorted(point for points in series for point in points)
    frame = _frame(every, zero=zero)
    marks = []
    for at, points in enumerate(series):
        path = " ".join(f"{'L' if n else 'M'}{frame.x(s):.1f} {frame.y(v):.1f}" for n, (s, v) in enumerate(points))
        marks.append(f'<path class="line series{at}" d="{path}"/>')
    texts: dict[int, list[str]] = {}
    for points in series:
        for step, value in points:
            texts.setdefault(step, []).append(number(value))
    return _chart(frame, marks, [(step, frame.x(step), " / ".join(found)) for step, found in sorted(texts.items())])


def bar_chart(points: Sequence[tuple[int, float]]) -> str:
    """One bar per step from zero; a zero shows as a thin base line."""
    width = _bar_width(len(points))
    frame = _frame(points, zero=True, pad=width / 2 + 1)
    marks = []
    for step, value in points:
        top = frame.y(value)
        height = max(HEIGHT - BOTTOM - top, 1.5)
        kind = "bar bad" if value > 0 else "bar good"
        marks.append(
            f'<rect class="{kind}" x="{frame.x(step) - width / 2:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" '
            f'width="{width:.1f}" height="{height:.1f}"/>'
        )
    return _chart(frame, marks, [(step, frame.x(step), number(value)) for step, value in points])


def stacked_chart(steps: Sequence[tuple[int, Sequence[tuple[str, float]]]]) -> str:
    """One bar per step, stacked from (name, seconds) parts in their given order."""
    totals = [(step, math.fsum(value for _, value in parts)) for step, parts in steps]
    width = _bar_width(len(steps))
    frame = _frame(totals, zero=True, pad=width / 2 + 1)
    marks, hover = [], []
    for step, parts in steps:
        base = 0.0
        for at, (_, value) in enumerate(parts):
            top, bottom = frame.y(base + value), frame.y(base)
            marks.append(
                f'<rect class="phase{at}" x="{frame.x(step) - width / 2:.1f}" y="{top:.1f}" '
                f'width="{width:.1f}" height="{max(bottom - top, 0):.1f}"/>'
            )
            base += value
        text = ", ".join(f"{name} {value:.2f}" for name, value in parts)
        hover.append((step, frame.x(step), f"{base:.2f} s ({text})"))
    return _chart(frame, marks, hover)


def _bar_width(count: int) -> float:
    return max(1.0, min(26.0, 0.72 * (WIDTH - LEFT - RIGHT) / max(count, 1)))


def _frame(points: Sequence[tuple[int, float]], *, zero: bool, top: float | None = None, pad: float = 4.0) -> Frame:
    values = [value for _, value in points]
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if zero and high > low:
        high += 0.05 * (high - low)
    if high == low:
        low, high = sorted((0.0, 2 * high))
    if high - low < _TINY:
        low, high = 0.0, 1.0
    if not zero:
        low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
    return Frame(first=points[0][0], last=points[-1][0], low=low, high=high if top is None else top, pad=pad)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round values between low and high."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= count:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def _chart(frame: Frame, marks: Sequence[str], hover: Sequence[tuple[int, float, str]]) -> str:
    """Axes around the marks, and what a pointer shows: (step, x, text) of each step."""
    grid = []
    for value in ticks(frame.low, frame.high):
        y = frame.y(value)
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(value)}</text>')
    for step in step_ticks(int(frame.first), int(frame.last)):
        x = frame.x(step)
        grid.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step}</text>')
    data = escape(json.dumps([[step, round(x, 1), text] for step, x, text in hover]), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" data-points="{data}">'
        f"{''.join(grid)}{''.join(marks)}"
        f'<line class="cross" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def step_ticks(first: int, last: int) -> list[int]:
    """Up to six whole step numbers, the first and last among them when they do not crowd."""
    if last - first < 6:
        return list(range(first, last + 1))
    found = [int(value) for value in ticks(first, last, 5)]
    return [step for step in found if first <= step <= last]
