"""Models and engines that the tests of this folder share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

# Spawned processes inherit this path: they import the engine of `watched` by name.
sys.path.insert(0, str(Path(__file__).parent))

import pytest
from hosted_engines import Engine, engine_config, hosted
from models import make_model


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("into_vllm")


@pytest.fixture(scope="session")
def tiny(home: Path) -> Path:
    return make_model(home / "tiny")


@pytest.fixture(scope="session")
def other(home: Path) -> Path:
    """The same architecture with other weights."""
    return make_model(home / "other", seed=1)


@pytest.fixture(scope="session")
def strict(home: Path, tiny: Path) -> Iterator[Engine]:
    """All modules on the samebits route, one worker, whole batches, prefix cache on."""
    with hosted(home, "strict", engine_config(tiny)) as engine:
        yield engine
