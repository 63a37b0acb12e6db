"""The linear map and its gradients."""

from __future__ import annotations

from samebits.contract.boundary import Boundary

LINEAR = Boundary(
    name="linear",
    version=1,
    dependency="y[m, n] depends on row m of x, row n of weight and bias[n], over all K",
    partition="K cut into S equal segments of consecutive k; S is a power of two that divides K",
    merge="the run's arithmetic (fma32, sm90 or cdna3) inside a segment, k ascending from +0; segments add in fp32 by "
    "a balanced binary tree over neighbours",
    precision="bf16 x, weight and bias, converted exactly; fp32 sums; bf16 y, or the fp32 sum itself",
    rounding="one rounding of the sum (with bias) to bf16, none for the fp32 forms; NaN is the canonical NaN",
    primitives="products x[m, k] weight[n, k] of the arithmetic; + for segments, then + for bias",
    specials="as the arithmetic says (fma32: IEEE, subnormal numbers kept, 0 * infinity is NaN); every NaN leaves as "
    "0x7fc0 (bf16) or 0x7fc00000 (fp32), whatever came in",
)

LINEAR_GRADIENT = Boundary(
    name="linear_gradient",
    version=1,
    dependency="dx[m, k]: row m of dy, column k of weight; dw[n, k]: column n of dy, column k of x",
    partition="none, whatever S the forward has",
    merge="the run's arithmetic; dx: n ascending from +0; dw: rows m ascending from the value the fp32 buffer holds, "
    "its groups counted from the first row of a call; "
    "dbias: + over rows m ascending from the value the fp32 buffer holds",
    precision="dy in bf16, x and weight in bf16; fp32 products and sums",
    rounding="an fp32 dy is rounded to bf16 first; dx rounded once to bf16, or fp32 where ranks add it up; "
    "dw and dbias stay fp32 in the buffer",
    primitives="products of the arithmetic; +",
    specials="as in linear; a NaN of dw and dbias is 0x7fc00000",
)
