import sys
from pathlib import Path

import pytest

from samebits.testing.runs import write_run

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"
