"""What the definitions give for the conformance cases, kept as digests: computed once, on any machine.

`python -m samebits.testing.definitions FOLDER --arithmetic sm90 [--processes N]` computes what FOLDER lacks, so that a
machine with a GPU need not: definitions take minutes where kernels take seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from samebits.backends import ARITHMETICS
from samebits.bits import digest
from samebits.testing.cases import DEFINITION, OPS, Case, Subject, applies, cases, right_of
from samebits.testing.golden import contract_of, inputs_digest


class Definitions:
    """Digests of what the definitions give, one file per case.

    They hold under one version of the op's contract, and for one stream of random numbers, which torch may draw
    differently in another version or on another processor: both are part of a file's name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / inputs_digest()[:12]

    def known(self, case: Case, arithmetic: str) -> list[str] | None:
        """The digest of each output, or None where nobody has computed them."""
        path = self._path(case, arithmetic)
        return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def digests(self, case: Case, arithmetic: str) -> list[str]:
        """The digest of each output; computed and kept where it is not known. The case must be one by definition."""
        found = self.known(case, arithmetic)
        if found is None:
            found = [digest(tensor) for tensor in right_of(case, Subject("reference", arithmetic=arithmetic))]
            path = self._path(case, arithmetic)
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(found), encoding="utf-8")
            new.replace(path)
        return found

    def missing(self, arithmetic: str, ops: Sequence[str] = OPS) -> list[Case]:
        """The cases by definition that nobody has computed."""
        subject = Subject(DEFINITION.backend, arithmetic=arithmetic)
        found = [case for op in ops for case in cases(op) if case.by_definition and applies(case, subject)]
        return [case for case in found if self.known(case, arithmetic) is None]

    def _path(self, case: Case, arithmetic: str) -> Path:
        return self._folder / arithmetic / contract_of(case.op).replace(" ", "+") / f"{case.name}.json"


def _compute(folder: Path, arithmetic: str, which: tuple[str, str]) -> str:
    """Cases hold functions, which don't travel between processes: `which` is the op and the name of one."""
    op, name = which
    for case in cases(op):
        if case.name == name:
            Definitions(folder).digests(case, arithmetic)
    return f"{op} {name}"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m samebits.testing.definitions", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arithmetic", default="fma32", choices=ARITHMETICS)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args(words)
    missing = [(case.op, case.name) for case in Definitions(asked.folder).missing(asked.arithmetic, asked.ops)]
    work = partial(_compute, asked.folder, asked.arithmetic)
    with ProcessPoolExecutor(asked.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(work, missing):
            print(done, flush=True)
    print(f"{len(missing)} cases were computed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
