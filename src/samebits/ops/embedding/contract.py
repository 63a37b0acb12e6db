from samebits.contract import Boundary

EMBEDDING = Boundary(
    name="embedding",
    version=1,
    dependency="one row of the table",
    partition="none: under tensor parallelism the owner's row is selected",
    merge="none: nothing is summed",
    precision="bf16",
    rounding="none: a copy",
    primitives="none; backward: a chain of + over tokens, ascending, for each row of the fp32 gradient",
)
