from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def instruction_set() -> Iterator[Callable[[str], None]]:
    """Force an instruction set for one test; skip, saying so, where this processor lacks it."""
    from samebits import _cpu

    def force(name: str) -> None:
        try:
            _cpu.force_instruction_set(name)
        except ValueError as error:
            pytest.skip(str(error))

    yield force
    _cpu.force_instruction_set("best")
