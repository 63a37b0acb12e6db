from samebits.contract import Boundary

ROTARY = Boundary(
    name="rotary",
    version=1,
    dependency="a pair (x[i], x[i + D/2]) of one head and the table row of its absolute position",
    partition="none",
    merge="none",
    precision="bf16 input, fp32 table and products, bf16 output",
    rounding="each product and each sum to fp32; one rounding of the output to bf16",
    primitives="*, +, - without contraction: y1 = x1 * cos - x2 * sin, y2 = x2 * cos + x1 * sin",
    constants={"table": "cos and sin of position * base^(-2i/D) in float64 by IEEE operations, rounded to fp32"},
)
