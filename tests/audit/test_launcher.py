"""What the launcher asks of a kernel holds for every kernel that is launched."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("triton", reason="Triton is not installed here: `make audit` runs these tests beside it")

import triton
import triton.language as tl

from samebits.backends.launcher import KNOWN, Launcher, cdiv, launcher, next_power_of_2
from samebits.testing import audit


@triton.jit
def constant_first(SIZE: tl.constexpr, x):
    tl.store(x, SIZE)


def test_every_kernel_has_its_constants_last() -> None:
    assert triton.__version__.startswith(KNOWN)
    listed = [importlib.import_module(audit.MODULES[group]).KERNELS[number][1] for group, number in audit.kernels()]
    assert len({id(kernel) for kernel in listed}) > 30
    for kernel in listed:
        assert isinstance(launcher(kernel), Launcher), kernel


def test_a_constant_before_an_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="constant_first constants must follow the arguments"):
        launcher(constant_first)


def test_sizes_are_those_of_triton() -> None:
    for number in range(1, 300):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        for size in (1, 2, 7, 64):
            assert cdiv(number, size) == triton.cdiv(number, size)
    assert cdiv(0, 8) == 0
