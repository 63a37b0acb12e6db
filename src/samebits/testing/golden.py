"""Recorded digests of what every conformance case by definition gives: no bit changes without a new contract version.

`python -m samebits.testing.golden` compares, and exits with 1 when a case gives other bits than recorded.
`python -m samebits.testing.golden --bless --reason "..."` records what has no digest yet: new cases, and all cases
of an op whose contract has a new version. Digests under an unchanged version are never overwritten. The reason goes
into CHANGELOG.md together with the digest of each file that was written.

A file: {"inputs": digest, "cases": {case: {contract version: [digest of each output]}}}.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch

from samebits.bits import digest
from samebits.contract import Boundary, digest_of
from samebits.testing.cases import Case, Subject, cases, difference, left_of

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests/golden"
CHANGELOG = ROOT / "CHANGELOG.md"
CPU = Subject("cpu")
COMMAND = "python -m samebits.testing.golden --bless --reason '...'"


class Refused(ValueError):
    """Nothing was recorded; the message says why."""


def contract_of(op: str) -> str:
    """The names and versions of the boundaries that an op promises, such as `linear@1 linear_gradient@1`."""
    module = importlib.import_module(f"samebits.contract.boundaries.{op}")
    return " ".join(sorted(value.id for value in vars(module).values() if isinstance(value, Boundary)))


def recorded_cases() -> tuple[Case, ...]:
    """The cases by definition: what others compare with each other are the same outputs again."""
    return tuple(case for case in cases() if case.by_definition)


def inputs_digest() -> str:
    """Names the random numbers that cases draw: torch may draw others in another version or on another processor."""
    generator = torch.Generator().manual_seed(3)
    drawn = (
        torch.randn(256, 1000, generator=generator),
        torch.randint(0, 2**62, (256,), generator=generator),
        torch.randperm(500, generator=generator),
    )
    return digest_of([digest(tensor) for tensor in drawn])


@dataclass
class Record:
    """The recorded digests of one op."""

    inputs: str
    cases: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """None where nothing was recorded. Raises ValueError for a file of another form."""
        if not path.exists():
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or set(data) != {"inputs", "cases"}:
            raise ValueError(f"{path}: want an object with 'inputs' and 'cases', got {str(data)[:80]}")
        return cls(**data)

    def to_json(self) -> str:
        return json.dumps({"inputs": self.inputs, "cases": self.cases}, indent=1, sort_keys=True) + "\n"

    def name(self) -> str:
        """Twelve hexadecimal digits that name this content."""
        return sha256(self.to_json().encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Keeper:
    """The recorded digests of some cases under `folder`, and the changelog that explains them."""

    cases: Sequence[Case] = field(default_factory=lambda: recorded_cases())
    folder: Path = FOLDER
    changelog: Path = CHANGELOG
    contract: Callable[[str], str] = contract_of
    inputs: Callable[[], str] = inputs_digest

    def ops(self) -> list[str]:
        """Every op that has cases or a file."""
        return sorted({case.op for case in self.cases} | {path.stem for path in self.folder.glob("*.json")})

    def problems(self, op: str) -> list[str]:
        """What is not as recorded, one line per case; empty when every bit is."""
        recorded = Record.read(self._path(op))
        if recorded is None:
            return [f"{op}: no digests are recorded; run {COMMAND}"]
        if recorded.inputs != self.inputs():
            return [
                f"{op}: torch {torch.__version__} draws other random numbers on this processor than those behind the "
                f"recorded digests, so nothing can be said about the bits; if that is to stay, run {COMMAND}"
            ]
        lines = []
        for name in sorted(recorded.cases.keys() - {case.name for case in self._cases(op)}):
            lines.append(f"{op} {name}: recorded, but there is no such case any more; run {COMMAND}")
        if recorded.name() not in self.changelog.read_text(encoding="utf-8"):
            lines.append(f"{op}: {self.changelog.name} gives no reason for the content {recorded.name()} of its file")
        for case in self._cases(op):
            lines += self._changes(case, recorded)
        return lines

    def bless(self, reason: str) -> list[str]:
        """Record what has no digest yet; the names of the files written.

        Raises Refused, having written nothing, without a reason, when a case gives other bits than those recorded
        under the same contract version, and when a new digest would be that of a case whose two sides differ.
        """
        if not reason.strip():
            raise Refused("recording needs a reason: it will stand in the changelog")
        wrong: list[str] = []
        records = {op: self._renewed(op, wrong) for op in self.ops()}
        if wrong:
            raise Refused(
                "other bits under an unchanged contract version (if they are meant, give the boundary a new version "
                "first), or bits that the case itself calls wrong:\n" + "\n".join(wrong)
            )
        known = self.changelog.read_text(encoding="utf-8")
        new = {op: record for op, record in records.items() if self._is_new(op, record, known)}
        if not new:
            return []
        self.changelog.write_text(_with_entry(known, self._entry(new, reason)), encoding="utf-8")
        self.folder.mkdir(parents=True, exist_ok=True)
        for op, record in new.items():
            if record is None:
                self._path(op).unlink()
            else:
                self._path(op).write_text(record.to_json(), encoding="utf-8")
        return [self._path(op).name for op in new]

    def _is_new(self, op: str, record: Record | None, changelog: str) -> bool:
        return Record.read(self._path(op)) != record or (record is not None and record.name() not in changelog)

    def _cases(self, op: str) -> list[Case]:
        return [case for case in self.cases if case.op == op]

    def _path(self, op: str) -> Path:
        return self.folder / f"{op}.json"

    def _changes(self, case: Case, recorded: Record) -> Iterable[str]:
        contract = self.contract(case.op)
        wanted = recorded.cases.get(case.name, {}).get(contract)
        if wanted is None:
            return [f"{case}: no digest is recorded under {contract}; run {COMMAND}"]
        found = outputs(case)
        if len(found) != len(wanted):
            return [f"{case}: {len(found)} outputs, recorded under {contract} are {len(wanted)}"]
        return [
            f"{case}: output {at} changed under {contract}: recorded {old[:12]}, now {now[:12]}"
            for at, (old, now) in enumerate(zip(wanted, found, strict=True))
            if old != now
        ]

    def _renewed(self, op: str, wrong: list[str]) -> Record | None:
        """The record as it should be, None for an op without cases; adds to `wrong` what may not be recorded."""
        cases, inputs = self._cases(op), self.inputs()
        if not cases:
            return None
        recorded = Record.read(self._path(op))
        old = recorded.cases if recorded is not None and recorded.inputs == inputs else {}
        contract = self.contract(op)
        renewed = Record(inputs)
        for case in cases:
            versions = dict(old.get(case.name, {}))
            if contract in versions:
                wrong += self._changes(case, Record(inputs, old))
            else:
                found = difference(case, CPU)
                wrong += [f"{case}: its two sides differ: {found}"] if found else []
                versions[contract] = outputs(case)
            renewed.cases[case.name] = versions
        return renewed

    def _entry(self, new: dict[str, Record | None], reason: str) -> str:
        files = ", ".join(
            f"`{op}` (removed)"
            if record is None
            else f"`{op}` ({self.contract(op).replace(' ', ', ')}: {record.name()})"
            for op, record in new.items()
        )
        text = f"Golden digests of {files}: {' '.join(reason.split())}"
        return textwrap.fill(
            text, 120, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def outputs(case: Case) -> list[str]:
    """The digest of each tensor that the kernels give for a case."""
    return [digest(tensor) for tensor in left_of(case, CPU)]


def _with_entry(changelog: str, entry: str) -> str:
    """The changelog with an entry at the end of its first section."""
    lines = changelog.rstrip("\n").split("\n")
    sections = [at for at, line in enumerate(lines) if line.startswith("## ")]
    if not sections:
        raise Refused("the changelog has no section ('## ...') to hold the reason")
    end = sections[1] if len(sections) > 1 else len(lines)
    while not lines[end - 1].strip():
        end -= 1
    if end == sections[0] + 1:
        entry = f"\n{entry}"
    return "\n".join([*lines[:end], entry, *lines[end:], ""])


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m samebits.testing.golden", description=__doc__)
    parser.add_argument("--bless", action="store_true", help="record what has no digest yet")
    parser.add_argument("--reason", default="", help="why; goes into CHANGELOG.md")
    chosen = parser.parse_args(words)
    keeper = Keeper()
    if chosen.bless:
        try:
            written = keeper.bless(chosen.reason)
        except Refused as error:
            print(f"refused: {error}", file=sys.stderr)
            return 2
        print(f"written: {', '.join(written) or 'nothing, every digest is recorded'}")
        return 0
    found = [line for op in keeper.ops() for line in keeper.problems(op)]
    print("\n".join(found) or f"{len(keeper.cases)} cases give the recorded bits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
