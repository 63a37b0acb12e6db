"""The embedding table and its gradient."""

from __future__ import annotations

from samebits.contract.boundary import Boundary

EMBEDDING = Boundary(
    name="embedding",
    version=1,
    dependency="one row of the table",
    partition="none: under tensor parallelism the owner's row is selected",
    merge="none: nothing is summed",
    precision="bf16",
    rounding="none: a copy",
    primitives="none",
    specials="every bit is copied, those of a NaN too; an id outside the table gives +0 and reads nothing",
)

EMBEDDING_BACKWARD = Boundary(
    name="embedding_backward",
    version=1,
    dependency="dw[id]: the rows t of dy whose id it is; ids outside the table take no part",
    partition="none",
    merge="dw[id] = dw[id] + dy[t], tokens t ascending from the value that the fp32 buffer holds",
    precision="bf16 dy, converted exactly; fp32 sums in the buffer",
    rounding="none; where there is no buffer the sum is rounded once to bf16",
    primitives="+",
    specials="as IEEE says, subnormal numbers kept; a NaN in a row that was added to is 0x7fc00000. "
    "A masked id (-100, one beyond the vocabulary, any int64) is never used as an index",
)
