"""The provider that docs/provider.md shows works as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from scoring import ROWS, exact, native, request

from samebits.bits import assert_same
from samebits.linear_logp import LinearLogp, ProviderSettings

PAGE = Path(__file__).parents[2] / "docs" / "provider.md"


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(code)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "provider_of_the_page.py").write_text(example())
    monkeypatch.syspath_prepend(str(tmp_path))
    return "provider_of_the_page.provider"


def test_it_is_short() -> None:
    assert sum(bool(line.strip()) for line in example().splitlines()) <= 30


@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.5, 2.0, ROWS)], ids=["one", "per row"])
def test_strict_mode_accepts_it_and_its_values_are_right(path: str, temperature: float | torch.Tensor) -> None:
    active = torch.arange(ROWS) % 4 != 0
    asked = request(temperature=temperature, active=active, with_entropy=True, with_entropy_grad=True)
    logp, entropy = LinearLogp(ProviderSettings(path=path, mode="strict"))(asked, native)
    log_p = exact(asked)
    error = logp[:, 0].double() - log_p.gather(1, asked.target_ids[:, None])[:, 0]
    assert float(error[active].detach().abs().max()) < 1e-5
    assert entropy is not None
    assert float((entropy + (log_p.exp() * log_p).sum(1))[active].detach().abs().max()) < 1e-5
    assert_same(logp[~active].detach(), torch.zeros(3, 1))


def test_the_table_of_memory_is_the_record() -> None:
    record = json.loads((PAGE.parents[1] / "benchmarks" / "results" / "linear_logp_memory.json").read_text())
    assert record["vocabulary"] == 151_936
    for tokens, logits in record["logits_mib_fp32"].items():
        peaks = [row["peak_mib"] for row in record["rows"] if row["tokens"] == int(tokens)]
        assert f"| {tokens} | {logits} | {' | '.join(map(str, peaks))} |" in PAGE.read_text(encoding="utf-8")
        native, scored, with_entropy = peaks
        assert max(scored, with_entropy) < native


def test_the_table_of_memory_says_what_the_record_says() -> None:
    record = json.loads((PAGE.parents[1] / "benchmarks/results/linear_logp_memory.json").read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    for tokens, logits in record["logits_mib_fp32"].items():
        peaks = [row["peak_mib"] for row in record["rows"] if row["tokens"] == int(tokens)]
        assert f"| {tokens} | {logits} | {' | '.join(map(str, peaks))} |" in text
