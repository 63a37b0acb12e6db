"""Wrong kernels must be noticed: a few faults here, all of them by `make sabotage`."""

from pathlib import Path

import pytest
import torch

from samebits.testing import check_kernels, faults_gpu, sabotage, sabotage_gpu
from samebits.testing.cases import OPS, Subject
from samebits.testing.definitions import Definitions
from samebits.testing.faults import FAULTS, Fault, with_fault
from samebits.testing.sabotage import NATIVE, ROOT, Finding, Notebook, Workshop, applicable, seed, sources

QUICK = applicable(fault for fault in FAULTS if fault.quick)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    folder: Path = tmp_path_factory.mktemp("sabotage")
    findings: dict[str, Finding] = {}
    seed(QUICK, Workshop(folder / "workshop"), folder, lambda fault, finding: findings.update({str(fault): finding}))
    return findings


@pytest.mark.parametrize("fault", QUICK, ids=str)
def test_a_wrong_kernel_is_noticed(fault: Fault, findings: dict[str, Finding]) -> None:
    finding = findings[str(fault)]
    assert 0 < len(finding.noticed) <= finding.cases


def test_faults_fit_the_kernels_of_today() -> None:
    for fault in FAULTS:
        if not fault.flag:
            assert with_fault((NATIVE / fault.file).read_text(), fault)


@pytest.mark.parametrize("fault", faults_gpu.FAULTS, ids=str)
def test_faults_fit_the_triton_kernels_of_today(fault: Fault) -> None:
    text = (ROOT / "src/samebits" / fault.file).read_text()
    compile(with_fault(text, fault), fault.file, "exec")
    with pytest.raises(ValueError, match="bring the fault up to date"):
        with_fault(text.replace(fault.edits[0][0], ""), fault)


def test_every_operator_has_faults_and_cases() -> None:
    assert {fault.op for fault in FAULTS} == set(OPS)
    assert {fault.op for fault in faults_gpu.FAULTS} == set(OPS) - {"sample_support"}  # no fault of its kernels yet
    assert len(FAULTS) >= 50


@pytest.mark.parametrize(
    ("noticed", "refused", "caught"),
    [(["a"], [], True), ([], [], False), ([], ["b"], False), ([], ["b", "c"], True)],
)
def test_on_a_card_a_refusal_counts_where_the_kernel_serves_without_the_fault(
    noticed: list[str], refused: list[str], caught: bool
) -> None:
    fault = faults_gpu.FAULTS[0]
    clean = {(fault.op, fault.arithmetic): sabotage_gpu.Finding([], ["b"], 9)}
    assert sabotage_gpu.is_caught({**clean, fault: sabotage_gpu.Finding(noticed, refused, 9)}, fault) is caught
    assert not sabotage_gpu.is_caught(clean, fault)


@pytest.mark.parametrize(("met", "noticed"), [(RuntimeError, True), (torch.OutOfMemoryError, False)])
def test_a_full_card_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, met: type[Exception], noticed: bool
) -> None:
    def stopped(*_: object) -> bool:
        raise met("stopped by the device")

    monkeypatch.setattr(check_kernels, "_same", stopped)
    subject = Subject("triton", "cuda", "fma32")
    if noticed:
        assert len(check_kernels.examine("swiglu", subject, Definitions(tmp_path), 1)["noticed"]) == 1
    else:
        with pytest.raises(met):
            check_kernels.examine("swiglu", subject, Definitions(tmp_path), 1)


def test_what_was_found_is_not_looked_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    words = ["--folder", str(tmp_path), "--filter", "sample: nine"]
    (fault,) = (fault for fault in FAULTS if str(fault) == "sample: nine rounds for ten")
    kept = tmp_path / sources()[:12]
    kept.mkdir()
    Notebook(kept / "found.json").add(fault, Finding(["a", "b"], 7))
    monkeypatch.setattr(sabotage, "seed", interrupted)
    assert sabotage.main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"caught by  2 of  7 cases  {fault} (found earlier)",
        "caught 1 of 1",
    ]
    with pytest.raises(KeyboardInterrupt):
        sabotage.main([*words, "--again"])


def test_nothing_found_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sabotage.main(["--folder", str(tmp_path), "--filter", "no such fault"]) == 1
    assert capsys.readouterr().out == "caught 0 of 0\n"


def dying(folder: Path, name: str) -> str:
    """A program that ends itself by this signal."""
    program = folder / f"dies-of-{name}"
    program.write_text(f"#!/bin/sh\nkill -{name} $$\n")
    program.chmod(0o700)
    return str(program)


@pytest.mark.parametrize(("name", "is_finding"), [("SEGV", True), ("ABRT", True), ("KILL", False), ("TERM", False)])
def test_only_a_crash_is_a_finding(
    name: str, is_finding: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sabotage.sys, "executable", dying(tmp_path, name))
    inspection = sabotage.Inspection(tmp_path)
    if is_finding:
        assert inspection.look(tmp_path / "any.so", "linear") == Finding([sabotage.CRASHED], 1)
    else:
        with pytest.raises(RuntimeError, match="failed"):
            inspection.look(tmp_path / "any.so", "linear")
