"""RMSNorm and its gradients."""

from __future__ import annotations

from samebits.contract.boundary import Boundary

LANES = 128

RMS_NORM = Boundary(
    name="rms_norm",
    version=1,
    dependency="every element of one row of width W; rows are independent",
    partition=f"{LANES} lanes: lane j takes the elements i = j (mod {LANES})",
    merge="within a lane a chain of fma, i ascending, from +0; lanes fold in halves (64 onto 64, 32 onto 32, ...)",
    precision="bf16 input and weight, fp32 sums and products, bf16 output",
    rounding="with a residual: bf16(x + residual) first, and that is the input; one rounding of the output to bf16",
    primitives="fma, +, *, correctly rounded / and sqrt: scale = 1 / sqrt(sum / W + eps); y = (x * scale) * weight",
    specials=(
        "a NaN makes its row NaN (0x7fc0). An infinity, or squares that overflow, give scale +0: zeros with the signs "
        "of the products, and NaN where the infinity stands. Subnormal numbers are kept; a row of zeros stays zeros"
    ),
    constants={"lanes": LANES},
)

RMS_NORM_BACKWARD = Boundary(
    name="rms_norm_backward",
    version=1,
    dependency="dx: the same row of dy, x, weight and its scale; dw[i]: column i of dy and x, over all rows",
    partition=f"dx: {LANES} lanes as in rms_norm; dw: none",
    merge=(
        "g = dy * weight; c: the lanes' dot of g and x, as in rms_norm; k = ((c * scale) * scale) / W; "
        "dx = (g - x * k) * scale, then + the gradient that reaches x + residual from elsewhere; "
        "dw[i] = fma(dy[r, i], x[r, i] * scale[r], dw[i]), rows r ascending from the value that the fp32 buffer holds"
    ),
    precision="bf16 dy, x and weight, fp32 scale as the forward left it; fp32 sums and products; bf16 dx, fp32 dw",
    rounding="one rounding of dx to bf16, which is also the gradient of the residual; dw stays fp32 in the buffer",
    primitives="fma, +, -, *, correctly rounded /",
    specials="as IEEE says, subnormal numbers kept; a NaN of dx is 0x7fc0, one of dw 0x7fc00000",
    constants={"lanes": LANES},
)
