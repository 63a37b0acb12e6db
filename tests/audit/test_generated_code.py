"""The rules on the text of generated code, one broken at a time; no compiler is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samebits.testing.generated_code import Code, violations

WGMMA = "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;"
PTX = Code(
    "sm_90", "tt.dot math.fma", f"{WGMMA}\nfma.rn.f32 %f1, %f2, %f3, %f4;\natom.global.add.u64 %rd1;", 168, 0, 1000
)
MFMA = "\tv_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]\n"
AMD = Code("gfx942", "tt.dot", f"{MFMA}\tv_add_f32 v1, v2, v3\n.amdhsa_float_denorm_mode_32 3\n", 168, 0, 1000)


def test_clean_code_breaks_nothing() -> None:
    assert violations(PTX) == []
    assert violations(AMD) == []


@pytest.mark.parametrize(
    ("code", "line", "rule"),
    [
        (PTX, "ex2.approx.ftz.f32 %f1, %f2;", "approximate ex2.approx.ftz.f32"),
        (PTX, "rcp.approx.f32 %f1, %f2;", "approximate rcp.approx.f32"),
        (PTX, "div.full.f32 %f1, %f2, %f3;", "approximate div.full.f32"),
        (PTX, "add.ftz.f32 %f1, %f2, %f3;", "flushes subnormals: add.ftz.f32"),
        (PTX, "red.global.add.f32 [%rd1], %f1;", "floating-point atomic red.global.add.f32"),
        (PTX, "atom.global.add.noftz.bf16x2 %r1, [%rd1], %r2;", "floating-point atomic"),
        (PTX, WGMMA.replace("bf16.bf16", "f16.f16"), "is not the arithmetic's"),
        (PTX, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1};", "is not the arithmetic's"),
        (AMD, "\tv_exp_f32 v1, v2\n", "approximate v_exp"),
        (AMD, "\tv_rcp_f32_e32 v1, v2\n", "approximate v_rcp"),
        (AMD, "\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]\n", "is not the arithmetic's"),
        (AMD, "\tv_fmac_f32_e32 v1, v2, v3\n", "a fused multiply-add that nobody wrote"),
        (AMD, "\tglobal_atomic_add_f32 v1, v2, s[0:1]\n", "floating-point atomic"),
    ],
)
def test_a_broken_rule_is_named(code: Code, line: str, rule: str) -> None:
    assert any(rule in broken for broken in violations(replace(code, text=f"{line}\n{code.text}")))


def test_what_was_asked_for_decides() -> None:
    assert violations(replace(PTX, ir="tt.dot")) == ["a fused multiply-add that nobody wrote"]
    assert violations(replace(PTX, ir="math.fma")) == ["has a matrix instruction that nobody asked for"]
    assert violations(replace(AMD, text=AMD.text.replace(MFMA, ""))) == [
        "asks for a matrix product and has no matrix instruction"
    ]
    assert violations(replace(AMD, text=AMD.text.replace("mode_32 3", "mode_32 0"))) == ["flushes subnormals of fp32"]


def test_resources_are_limited() -> None:
    assert "spills" in violations(replace(PTX, spills=3))[0]
    assert "shared memory" in violations(replace(AMD, shared_bytes=70_000))[0]
