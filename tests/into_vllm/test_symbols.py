"""The installed vLLM has every symbol that the integration extends, overrides or calls."""

from __future__ import annotations

import pytest

from samebits.into_vllm.patches import PATCHES_BY_GROUP, SYMBOLS
from samebits.patching import census


@pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn about its dependencies
def test_census() -> None:
    assert len(SYMBOLS) > 20
    assert census(SYMBOLS) == []


def test_every_patch_is_in_the_census() -> None:
    for patches in PATCHES_BY_GROUP.values():
        assert all(patch.symbol in SYMBOLS for patch in patches)
