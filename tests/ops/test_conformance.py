"""Every conformance case: the two sides of each give the same bits."""

import pytest

from samebits.testing.cases import CASES, Case, difference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    found = difference(case)
    assert found is None, f"{case}: {found}"
