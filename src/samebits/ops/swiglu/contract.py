from samebits.contract import Boundary

SWIGLU = Boundary(
    name="swiglu",
    version=1,
    dependency="gate[i] and up[i] of one row",
    partition="none",
    merge="none",
    precision="bf16 gate and up as the projection left them, fp32 inside, bf16 output",
    rounding="one rounding of the output to bf16",
    primitives="sigmoid(g) = 1 / (1 + exp2(-(g * log2e))); y = (g * sigmoid(g)) * u; owned exp2, correctly rounded /",
)
