"""The located site as files that need neither engine: inputs, weights and outputs of both sides, and a test of them.

repro.safetensors   trainer.reads.*, trainer.weights.*, trainer.writes.*, and the same of rollout
repro.json          the site, its token, constants of the model, routes, versions
test_repro.py       what both sides read, whether they agree, and what the contract's op makes of it
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from samebits.bits import assert_same
from samebits.locate.recompute import recompute
from samebits.locate.result import Located
from samebits.locate.sample import SiteSample

SCHEMA = "samebits.repro/1"
TENSORS, RECORD, TEST = "repro.safetensors", "repro.json", "test_repro.py"
Side = Literal["trainer", "rollout"]
_PARTS = ("reads", "weights", "writes")

_TEST = '''"""{summary}

Needs samebits, but no engine: `python -m pytest {name}`. A test that fails shows the difference.
"""

from pathlib import Path

from samebits.locate.repro import Repro

REPRO = Repro.open(Path(__file__).parent)


def test_both_sides_read_the_same() -> None:
    REPRO.assert_same("reads")


def test_both_sides_hold_the_same_weights() -> None:
    REPRO.assert_same("weights")


def test_both_sides_write_the_same() -> None:
    REPRO.assert_same("writes")
{contract}'''
_CONTRACT = """

def test_the_trainer_gives_the_bits_of_the_contract() -> None:
    REPRO.assert_contract("trainer")


def test_the_rollout_side_gives_the_bits_of_the_contract() -> None:
    REPRO.assert_contract("rollout")
"""


class Repro:
    """A written repro: both sides' tensors, and what the contract's op makes of them."""

    def __init__(self, record: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.record, self._tensors = record, tensors

    @classmethod
    def open(cls, folder: Path) -> Repro:
        """Reads what `write_repro` wrote. Raises ValueError for another schema, OSError for missing files."""
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record.get("schema") != SCHEMA:
            raise ValueError(f"{folder / RECORD}: schema is {record.get('schema')!r}, want {SCHEMA!r}")
        return cls(record, load_file(folder / TENSORS))

    def part(self, side: Side, part: str) -> dict[str, torch.Tensor]:
        """The tensors of one side: `reads`, `weights` or `writes`."""
        start = f"{side}.{part}."
        names = self.record["names"][side][part]
        return {name: self._tensors[start + name] for name in names}

    def assert_same(self, part: str) -> None:
        """AssertionError naming the first tensor of which the two sides hold other bits."""
        left, right = self.part("trainer", part), self.part("rollout", part)
        for name in (name for name in left if name in right):
            if left[name].dtype != right[name].dtype:
                raise AssertionError(
                    f"{name}: {left[name].dtype} on the trainer, {right[name].dtype} on the rollout side"
                )
            assert_same(left[name], right[name], f"{name} (trainer against rollout side)")

    def assert_contract(self, side: Side) -> None:
        """AssertionError where a side did not write what the contract's op makes of what it read."""
        reads = self.part(side, "reads") or self.part("trainer", "reads")
        wanted = recompute(self.record["site"], reads, self.part(side, "weights"), self.record["constants"])
        for name, row in self.part(side, "writes").items():
            if row.dtype != wanted[name].dtype:
                raise AssertionError(f"{name}: {row.dtype} on the {side}, {wanted[name].dtype} by the contract")
            assert_same(row, wanted[name], f"{name} ({side} against contract)")


def write_repro(folder: Path, located: Located, sample: SiteSample) -> Path:
    """Writes the three files into `folder` and returns the path of the test. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, dict[str, list[str]]] = {}
    for side, held in (("trainer", sample.trainer), ("rollout", sample.rollout)):
        names[side] = {part: list(getattr(held, part)) for part in _PARTS}
        for part in _PARTS:
            # clones: safetensors refuses tensors that share memory, as both sides' equal weights do
            tensors |= {f"{side}.{part}.{name}": t.contiguous().clone() for name, t in getattr(held, part).items()}
    found = located.as_data()
    record = {
        "schema": SCHEMA,
        "site": sample.site.name,
        "layer": sample.site.layer,
        "boundary": sample.site.boundary,
        "sequence": sample.token.sequence,
        "index": sample.token.index,
        "constants": sample.constants,
        "names": names,
        "summary": located.summary,
        "trainer": found["trainer"],
        "rollout": found["rollout"],
        "versions": {name: version(name) for name in ("samebits", "torch")},
    }
    save_file(tensors, folder / TENSORS)
    (folder / RECORD).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    contract = "" if sample.site.boundary == "copy" else _CONTRACT
    text = _TEST.format(summary=located.summary.replace("\\", ""), name=TEST, contract=contract)
    (folder / TEST).write_text(text, encoding="utf-8")
    return folder / TEST
