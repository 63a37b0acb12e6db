"""The program in docs/vllm.md, up to the start of its engine."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from samebits.contract import RunContract

PAGE = Path(__file__).parents[2] / "docs/vllm.md"


def test_the_program_of_the_page_names_what_there_is(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "own_program.py"
    file.write_text(program)
    found = runpy.run_path(str(file))
    assert isinstance(found["contract"], RunContract)
    assert found["config"].contract == found["contract"].as_data()
    assert found["request"].max_tokens == 16
    called = set(re.findall(r"engine\.(\w+)\(", program))
    assert called == {"generate", "publish", "close"} <= set(dir(found["RolloutEngine"]))
