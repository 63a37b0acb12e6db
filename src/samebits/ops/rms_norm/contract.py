from samebits.contract import Boundary

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
    constants={"lanes": LANES},
)
