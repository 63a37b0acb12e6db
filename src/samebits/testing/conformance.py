"""`python -m samebits.testing.conformance`: does a backend give the contract's bits?

One line per case, which is also the filter that runs it alone. The last line counts. Exit code 0: every case that
ran is the same; 1: some differ or failed; 2: nothing ran, so nothing is known.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from samebits.backends import ARITHMETICS, announced
from samebits.bits import digest
from samebits.testing.cases import OPS, Case, Subject, applies, cases, compared, left_of, right_of
from samebits.testing.definitions import Definitions

SAME, DIFFERS, FAILED, REFUSED = "same", "DIFFERS", "FAILED", "refused"


@dataclass(frozen=True)
class Row:
    """One line of the table: a case of an op, computed by a subject."""

    case: Case
    subject: Subject

    def __str__(self) -> str:
        return f"{self.case.op} {self.subject.backend} {self.case.name}"


@dataclass(frozen=True)
class Result:
    """`outcome` is SAME, DIFFERS, FAILED (an exception) or REFUSED (a ValueError: the backend does not serve this)."""

    row: Row
    outcome: str
    why: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.outcome:8}{self.seconds:7.2f} s  {self.row}{': ' if self.why else ''}{self.why}"


def table(subject: Subject, long: bool = False, ops: Sequence[str] = OPS) -> list[Row]:
    """Every row that means something for the subject. Cheap: no number is drawn."""
    return [Row(case, subject) for op in ops for case in cases(op, long) if applies(case, subject)]


def chosen(rows: Sequence[Row], text: str) -> list[Row]:
    """The rows that print as `text`, or else those that contain each of its words."""
    exact = [row for row in rows if str(row) == text]
    return exact or [row for row in rows if all(word in str(row) for word in text.split())]


def run(row: Row, definitions: Definitions | None = None) -> Result:
    """Compute both sides and compare them. A backend's exceptions are results, too.

    Where `definitions` knows what the definition gives it is computed only to say how the subject differs.
    """
    begin = time.perf_counter()
    try:
        why = _difference(row.case, row.subject, definitions)
        outcome = DIFFERS if why else SAME
    except ValueError as error:
        outcome, why = REFUSED, str(error)
    except Exception as error:  # noqa: BLE001  whatever a backend under test raises is its result
        outcome, why = FAILED, f"{type(error).__name__}: {error}"
    return Result(row, outcome, why, time.perf_counter() - begin)


def _difference(case: Case, subject: Subject, definitions: Definitions | None) -> str:
    left = left_of(case, subject)
    known = definitions.digests(case, subject.arithmetic) if definitions is not None and case.by_definition else None
    if known == [digest(tensor) for tensor in left]:
        return ""
    return compared(left, right_of(case, subject))


def ops_of(backend: str) -> tuple[str, ...]:
    """The ops to test: those that were announced for an outside backend, all ops for one of samebits."""
    outside = {op for op, name in announced() if name == backend}
    return tuple(op for op in OPS if op in outside) or OPS


def results(words: Sequence[str], rows: Sequence[Row], processes: int) -> Iterator[Result]:
    """The result of each row, in their order; `words` are the arguments that chose them."""
    if processes == 1:
        definitions = _definitions(_parsed(words))
        yield from (run(row, definitions) for row in rows)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for row, (outcome, why, seconds) in zip(rows, pool.map(partial(_nth, words), range(len(rows))), strict=True):
            yield Result(row, outcome, why, seconds)


def _nth(words: Sequence[str], number: int) -> tuple[str, str, float]:
    """What the row of this number gives, without the row: its functions don't travel between processes."""
    asked = _parsed(words)
    result = run(_rows(asked)[number], _definitions(asked))
    return result.outcome, result.why, result.seconds


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m samebits.testing.conformance", description=__doc__)
    parser.add_argument("--backend", default="cpu", help="who is tested: cpu, triton, or a registered name")
    parser.add_argument("--device", default="cpu", help="where its tensors lie: cpu, cuda, cuda:1 ...")
    parser.add_argument("--arithmetic", default="fma32", choices=ARITHMETICS, help="how dot products accumulate")
    parser.add_argument("--filter", default="", metavar="TEXT", help="a printed line, or words that it must contain")
    parser.add_argument("--long", action="store_true", help="the cases of `make conformance`, too")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--processes", type=int, default=1, help="how many take cases in turn")
    parser.add_argument("--definitions", type=Path, metavar="FOLDER", help="keeps what definitions give between runs")
    return parser.parse_args(words)


def _definitions(asked: argparse.Namespace) -> Definitions | None:
    return None if asked.definitions is None else Definitions(asked.definitions)


def _rows(asked: argparse.Namespace) -> list[Row]:
    subject = Subject(asked.backend, asked.device, asked.arithmetic)
    return chosen(table(subject, asked.long, ops_of(asked.backend)), asked.filter)


def _problem(asked: argparse.Namespace, rows: Sequence[Row]) -> str:
    """Why no case can run, or an empty text."""
    if not rows:
        return f"no case contains the words of {asked.filter!r}; see --list"
    try:
        torch.empty(1, device=asked.device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts that it has it
        reason = str(error).partition("\n")[0]
        return f"device {asked.device!r}: want cpu, or a card that torch sees, such as cuda or cuda:1: {reason}"
    return ""


def main(words: Sequence[str]) -> int:
    asked = _parsed(words)
    rows = _rows(asked)
    if asked.list:
        print("\n".join(map(str, rows)))
        return 0
    problem = _problem(asked, rows)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    for result in results(words, rows, asked.processes):
        counts[result.outcome] += 1
        print(result, flush=True)
    print(f"{len(rows)} cases: " + ", ".join(f"{counts[name]} {name}" for name in (SAME, DIFFERS, FAILED, REFUSED)))
    if counts[DIFFERS] or counts[FAILED]:
        return 1
    return 0 if counts[SAME] else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
