"""Rotary position embedding and its gradient."""

from __future__ import annotations

from samebits.contract.boundary import Boundary

ROTARY = Boundary(
    name="rotary",
    version=1,
    dependency="a pair (x[i], x[i + D/2]) of one head and the table row of its absolute position",
    partition="none",
    merge="none",
    precision="bf16 input, fp32 table and products, bf16 output",
    rounding="each product and each sum to fp32; one rounding of the output to bf16",
    primitives="*, +, - without contraction: y1 = x1 * cos - x2 * sin, y2 = x2 * cos + x1 * sin",
    specials="as IEEE says (infinity - infinity and 0 * infinity are NaN), subnormal numbers kept; a NaN is 0x7fc0",
    constants={"table": "cos and sin of position * base^(-2i/D) in float64 by IEEE operations, rounded to fp32"},
)

ROTARY_BACKWARD = Boundary(
    name="rotary_backward",
    version=1,
    dependency="a pair (dy[i], dy[i + D/2]) of one head and the table row of its absolute position",
    partition="none",
    merge="none",
    precision="bf16 dy, fp32 table and products, bf16 dx",
    rounding="each product and each sum to fp32; one rounding of dx to bf16",
    primitives="as rotary with -sin for sin: dx1 = dy1 * cos - dy2 * (-sin), dx2 = dy2 * cos + dy1 * (-sin)",
    specials="as in rotary",
)
