"""The pairs of engines that tests of localisation share: each serves many planted faults."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

# Spawned processes inherit this path: they import the faulty sides by name.
sys.path.insert(0, str(Path(__file__).parent))

import pytest
from hosted_sides import Pair, hosted_pair

from samebits.testing.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("locate")


@pytest.fixture(scope="session")
def qwen3(shop: Path) -> Path:
    # long sums, so that another order of K still shows behind the rounding to bf16
    return write_tiny_model(shop / "qwen3", hidden_size=256, intermediate_size=1024)


@pytest.fixture(scope="session")
def pair(shop: Path, qwen3: Path) -> Iterator[Pair]:
    """Both sides on the samebits route, one process each: the rollout side is the straight decoder."""
    with hosted_pair(shop, qwen3, "pair") as found:
        yield found
