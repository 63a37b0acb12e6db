"""The audit of generated code: every kernel is listed, and a kernel that breaks a rule is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here: `make audit` runs these tests beside it")
sys.path.insert(0, str(Path(__file__).parent))

import faulty_kernels

from samebits.testing import audit
from samebits.testing.generated_code import violations

TYPES = {"x": "*fp32", "y": "*fp32"}


@pytest.mark.parametrize("target", audit.TARGETS)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("approximate", "approximate"),
        ("half_precision", "is not the arithmetic's"),
        ("atomic_sum", "floating-point atomic"),
    ],
)
def test_a_seeded_violation_is_found(name: str, rule: str, target: str) -> None:
    kernel = getattr(faulty_kernels, name)
    finding = audit.examine(name, kernel, TYPES, {}, {}, target)
    assert any(rule in broken for broken in finding.broken), finding


@pytest.mark.parametrize("target", audit.TARGETS)
def test_an_ordinary_kernel_breaks_nothing(target: str) -> None:
    assert audit.examine("clean", faulty_kernels.clean, TYPES, {}, {}, target).broken == []
    assert audit.examine("contracted", faulty_kernels.contracted, TYPES, {}, {}, target).broken == []


def test_contraction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    code = audit.compile_for(faulty_kernels.contracted, TYPES, {}, {}, "sm_90")
    assert violations(code) == []
    import triton.compiler

    compile = triton.compiler.compile

    def fusing(source, target, options):
        return compile(source, target=target, options=options | {"enable_fp_fusion": True})

    monkeypatch.setattr(triton.compiler, "compile", fusing)
    for target in ("sm_90", "gfx942"):
        code = audit.compile_for(faulty_kernels.contracted, TYPES, {}, {}, target)
        assert "a fused multiply-add that nobody wrote" in violations(code), target


def test_every_module_with_triton_kernels_is_audited() -> None:
    rooms = Path(audit.__file__).parents[1] / "ops"
    ops = {path.parent.name for path in rooms.glob("*/triton.py")}
    assert ops == set(audit.OPS)
    assert {group for group, _ in audit.kernels()} == ops | {"collectives", "gradient_norm", "weights"}
