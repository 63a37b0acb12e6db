"""What localisation found, on a terminal."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samebits.locate.result import Located
from samebits.locate.values import RowDifference
from samebits.report.terminal import COLOURS, print_whole

_BAR = 30


def show(found: Located) -> None:
    """Prints the verdict first, then where, both sides, the values, and how to reproduce it."""
    console = Console(highlight=False, soft_wrap=True)
    colour = COLOURS[found.verdict]
    kind = f" · {found.kind}" if found.kind else ""
    console.print(f"[bold {colour}]{found.verdict.value}{kind}[/]: {escape(found.summary)}")
    where = found.where
    if where is not None and where.tokens_differing:
        console.print(f"  {where.tokens_differing} of {where.tokens_compared} tokens differ there")
    if found.trainer is not None and found.rollout is not None:
        print_whole(_sides(found), console)
    for difference in found.differences[:3]:
        _values(console, difference)
    if len(found.differences) > 3:
        console.print(f"  and {len(found.differences) - 3} more rows")
    if found.weight is not None:
        console.print(f"  {found.weight.name}{list(found.weight.index)}, of the whole parameter:")
        _values(console, found.weight.values)
    for hint in found.hints:
        console.print(f"  note: {escape(hint)}")
    console.print(f"  compared: {found.points_compared} points over {found.tokens_compared} tokens")
    if found.not_compared:
        console.print(f"  not recorded on both sides: {', '.join(found.not_compared[:6])}{_more(found.not_compared)}")
    if found.replayed is not None:
        came = found.replayed
        console.print(
            f"  of {came.recorded} recorded log-probabilities came out again: {came.rollout} of the rollout side, "
            f"{came.trainer} of the trainer"
        )
    if found.in_the_run:
        console.print(f"  {escape(found.in_the_run)}")
    if found.repro:
        console.print(f"  without either engine: python -m pytest {escape(found.repro)}")


def _more(names: tuple[str, ...]) -> str:
    return f" and {len(names) - 6} more" if len(names) > 6 else ""


def _sides(found: Located) -> Table:
    table = Table("side", "route", "computed by", "with", "bits of the contract", box=SIMPLE, pad_edge=False)
    for name, side in (("trainer", found.trainer), ("rollout", found.rollout)):
        assert side is not None
        with_ = ", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in side.parameters.items()
        )
        answer = {True: "yes", False: "no", None: "unknown"}[side.gives_the_contract]
        table.add_row(name, side.route, side.implementation, with_, answer)
    return table


def _values(console: Console, difference: RowDifference) -> None:
    by = "" if difference.max_abs is None else f", by {difference.max_abs:.3g} at most"
    console.print(
        f"  {difference.point}: {difference.count} of {difference.total} {difference.dtype} values differ{by}"
    )
    for label, element in (("first", difference.first), ("worst", difference.worst)):
        steps = "not a number" if element.ulps is None else f"{element.ulps} ULP"
        console.print(f"    {label}, column {element.column}: trainer {element.left}, rollout {element.right}, {steps}")
    largest = max(difference.histogram.values())
    for name, count in difference.histogram.items():
        bar = "█" * max(1, round(_BAR * count / largest))
        console.print(f"    {name + (' ULP' if name[0] != 'n' else ''):>16} {bar} {count}")
