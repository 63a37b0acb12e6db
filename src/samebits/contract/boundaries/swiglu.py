"""SwiGLU and its gradient."""

from __future__ import annotations

from samebits.contract.boundary import Boundary

SWIGLU = Boundary(
    name="swiglu",
    version=1,
    dependency="gate[i] and up[i] of one row",
    partition="none",
    merge="none",
    precision="bf16 gate and up as the projection left them, fp32 inside, bf16 output",
    rounding="one rounding of the output to bf16",
    primitives="sigmoid(g) = 1 / (1 + exp2(-(g * log2e))); y = (g * sigmoid(g)) * u; owned exp2, correctly rounded /",
    specials=(
        "as IEEE says, subnormal numbers kept; sigmoid is +0 below about -88.7, so a gate of -infinity gives NaN and a "
        "large negative one a zero; a NaN is 0x7fc0"
    ),
)

SWIGLU_BACKWARD = Boundary(
    name="swiglu_backward",
    version=1,
    dependency="dy[i], gate[i] and up[i] of one row",
    partition="none",
    merge="none",
    precision="bf16 dy, gate and up, fp32 inside, bf16 gradients",
    rounding="one rounding of each gradient to bf16",
    primitives="s = sigmoid(g) as in swiglu; dg = ((dy * u) * s) * (1 + g * (1 - s)); du = dy * (g * s)",
    specials="as in swiglu",
)
