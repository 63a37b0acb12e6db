"""The Triton form of the primitives: what the compiler makes of it, and its bits where there is a card."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from samebits.arithmetic import exp2, round_bf16, sigmoid
from samebits.bits import assert_same

pytest.importorskip("triton", reason="Triton is not installed: its form of the primitives is not checked")

# In a process of its own: Triton imports and warns as it likes.
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from samebits.arithmetic import triton as owned
for which in ("exp2", "sigmoid", "sqrt", "round_bf16"):
    out = "*bf16" if which == "round_bf16" else "*fp32"
    types = {"x": "*fp32", "y": out, "n": "i64", "WHICH": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(owned._unary, signature=types, constexprs={"WHICH": which, "BLOCK": 128})
    kernel = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    print("=== " + which)
    print(kernel.asm["ptx"])
"""


@pytest.fixture(scope="module")
def assembly() -> dict[str, str]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = re.split(r"^=== (\w+)$", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def operations(ptx: str) -> set[str]:
    return set(
        re.findall(r"^\s*(?:@!?\S+\s+)?((?:add|sub|mul|fma|div|rcp|sqrt|rsqrt|ex2)\.\S*f32)\s", ptx, re.MULTILINE)
    )


def test_only_ieee_operations_are_left(assembly: dict[str, str]) -> None:
    exact = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "fma.rn.f32"}
    plain = {"add.f32", "sub.f32", "mul.f32"}  # round to nearest unless the assembler may fuse them, which it may not
    assert operations(assembly["exp2"]) <= exact | plain
    assert "fma.rn.f32" in operations(assembly["exp2"])
    assert operations(assembly["sigmoid"]) <= exact | plain | {"div.rn.f32"}
    assert operations(assembly["sqrt"]) == {"sqrt.rn.f32"}
    assert operations(assembly["round_bf16"]) == set()
    for ptx in assembly.values():
        assert "ftz" not in ptx
        assert "approx" not in ptx


# Triton's interpreter rounds a multiply-add twice, so it gets one that rounds once. Its conversion to bf16 cuts off,
# which a card's does not: that function is compared on a card alone.
INTERPRET = """
import numpy as np, torch
from triton.runtime import interpreter
from samebits.arithmetic import canonical_nan, exp2, fma, sigmoid, sqrt
from samebits.bits import assert_same

def create_fma(self, *operands):
    arrays = [torch.from_numpy(np.ascontiguousarray(each.data, dtype=np.float32)) for each in operands]
    rounded = fma(*torch.broadcast_tensors(*arrays))
    return interpreter.TensorHandle(rounded.numpy(), operands[-1].dtype.scalar)

interpreter.InterpreterBuilder.create_fma = create_fma
from samebits.arithmetic import triton as owned
g = torch.Generator().manual_seed(1)
bits = torch.randint(-(2**31), 2**31, (1 << 15,), generator=g).to(torch.int32).view(torch.float32)
x = torch.cat([bits, torch.linspace(-160, 130, 5003), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])
for fast, definition in ((owned.exp2, exp2), (owned.sigmoid, sigmoid)):
    assert_same(fast(x), definition(x), fast.__name__)
assert_same(canonical_nan(owned.sqrt(x)), sqrt(x), "sqrt")
assert_same(canonical_nan(owned.divide(x, x.flip(0))), canonical_nan(x / x.flip(0)), "divide")
print("same")
"""


def test_the_interpreted_form_gives_the_bits_of_the_definition() -> None:
    command = [sys.executable, "-W", "ignore", "-c", INTERPRET]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.stdout == "same\n", done.stderr[-2000:]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA card: recipes/sm90_vectors.py compares all 2^32 inputs"
)
def test_the_card_gives_the_bits_of_the_definition() -> None:
    from samebits.arithmetic import triton as owned

    g = torch.Generator().manual_seed(1)
    x = torch.randint(-(2**31), 2**31, (1 << 20,), generator=g).to(torch.int32).view(torch.float32)
    for fast, definition in ((owned.exp2, exp2), (owned.sigmoid, sigmoid), (owned.round_bf16, round_bf16)):
        assert_same(fast(x.cuda()).cpu(), definition(x), fast.__name__)
