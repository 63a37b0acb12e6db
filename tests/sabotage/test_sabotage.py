"""Wrong kernels must be noticed: a few faults here, all of them by `make sabotage`."""

from pathlib import Path

import pytest

from samebits.testing import faults_gpu
from samebits.testing.cases import OPS
from samebits.testing.faults import FAULTS, Fault
from samebits.testing.sabotage import ROOT, Inspection, Workshop
from samebits.testing.sabotage_gpu import faulty

QUICK = [fault for fault in FAULTS if fault.quick]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workshop, Inspection]:
    folder: Path = tmp_path_factory.mktemp("sabotage")
    workshop, inspection = Workshop(folder / "build"), Inspection(folder)
    clean = workshop.library()
    for op in sorted({fault.op for fault in QUICK}):
        assert inspection.differing(clean, op)[0] == [], "the suite sees a difference where there is no fault"
    return workshop, inspection


@pytest.mark.parametrize("fault", QUICK, ids=str)
def test_a_wrong_kernel_is_noticed(fault: Fault, workshop: tuple[Workshop, Inspection]) -> None:
    shop, inspection = workshop
    shop.put_in(fault)
    try:
        noticed, _ = inspection.differing(shop.library(), fault.op)
    finally:
        shop.take_out(fault)
    assert noticed


def test_faults_fit_the_kernels_of_today() -> None:
    for fault in FAULTS:
        if fault.flag:
            continue
        text = (ROOT / "src/samebits/csrc" / fault.file).read_text()
        for old, new in fault.edits:
            assert text.count(old) == 1, f"{fault}: {old!r}"
            text = text.replace(old, new)


def test_every_operator_has_faults_and_cases() -> None:
    assert {fault.op for fault in FAULTS} == set(OPS)
    assert len(FAULTS) >= 50


@pytest.mark.parametrize("fault", faults_gpu.FAULTS, ids=str)
def test_faults_fit_the_triton_kernels_of_today(fault: Fault) -> None:
    text = (ROOT / "src/samebits" / fault.file).read_text()
    compile(faulty(fault, text), fault.file, "exec")
    with pytest.raises(ValueError, match="bring the fault up to date"):
        faulty(fault, text.replace(fault.edits[0][0], ""))


def test_every_operator_with_triton_kernels_has_faults_in_them() -> None:
    assert {fault.op for fault in faults_gpu.FAULTS} == set(OPS) - {"sample_support"}
