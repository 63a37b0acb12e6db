"""Causal attention and its gradients."""

from __future__ import annotations

from samebits.contract.boundary import Boundary

TILE = 64
CHUNK = 512
LANES = 128

# under the arithmetic of a matrix unit (matrix_form.py)
SUM_LANES = 8
WEIGHT_COEFFICIENTS = tuple(float.fromhex(c) for c in ("0x1.62f5fap-1", "0x1.f00c4cp-3", "0x1.c2a218p-5"))
LEAST_EXPONENT = -125.0

_MATRIX_FORM = (
    "Under sm90 and cdna3 (matrix units) instead: m' = max(m, (largest s) * c), NaN if one is NaN; "
    "a = w(m - m') + (m' - m'), so NaN for an infinite m'; p = w(fma(s, c, -m')); b = w(m_c - m') + (m' - m'); with "
    "w(t) = 2^n * (1 + r (c1 + r (c2 + r c3))) by fma, n the nearest integer of t, r = t - n, t at least -125 (NaN "
    f"counts as -125); a tile's p fold in halves to {SUM_LANES} lanes, l_lane = fma(l_lane, a, fold), and the lanes "
    "fold in halves at the end of the chunk; out = acc * (1 / l)"
)

ATTENTION = Boundary(
    name="attention",
    version=1,
    dependency="a query row of one head at absolute position p: keys and values 0..p of its sequence and kv head",
    partition=f"keys at absolute positions, in tiles of {TILE} inside chunks of {CHUNK}",
    merge=(
        "scores: the run's arithmetic (fma32, sm90 or cdna3) over d ascending from +0. A chunk starts "
        "from m = -inf, l = +0, acc = +0 and takes its tiles in ascending order: "
        "m' = max(m, t), a = exp2(m - m'), p = exp2(t - m'); l = fma(l, a, sum of "
        f"the {TILE} p folded in halves); acc = acc * a, then the arithmetic adds bf16(p_j) v_j to it, j ascending. "
        "Chunks merge in ascending order onto the first chunk's state: m' = max(m, m_c), a = exp2(m - m'), "
        "b = exp2(m_c - m'), l = fma(l, a, l_c * b), acc = fma(acc, a, acc_c * b). out = acc / l. "
        "A masked key (j > p) has p_j = +0 and v_j = +0; masked keys end the last tile, where all they can do is "
        "to turn a -0 of acc into +0. A tile or chunk with no key for a row leaves its state untouched. " + _MATRIX_FORM
    ),
    precision="bf16 q, k, v; fp32 scores, m, l, acc; bf16 output",
    rounding=(
        "c = fp32(scale * log2 e), the product in float64; t = s * c in fp32; p rounded to bf16 for the product "
        "with v and unrounded in the row sum; one rounding of the output to bf16"
    ),
    primitives=("fma, +, -, *, correctly rounded /, exp2 (owned)"),
    specials=(
        "max skips NaN, a NaN score makes its row NaN through p, a score of +inf (or only scores of -inf) gives NaN; "
        "a NaN output is 0x7fc0; rows outside every sequence give +0; keys and values ahead of a row are not read. "
        "Under sm90 and cdna3 values are finite: an infinity or NaN in v reaches the earlier rows of its tile"
    ),
    constants={
        "tile": TILE,
        "chunk": CHUNK,
        "sum_lanes": SUM_LANES,
        "weight_coefficients": " ".join(c.hex() for c in WEIGHT_COEFFICIENTS),
    },
)

ATTENTION_BACKWARD = Boundary(
    name="attention_backward",
    version=1,
    dependency="one sequence and one kv head: its keys, values and the query rows of its heads",
    partition="dQ: the keys of a row; dK, dV: the rows of a key; a chain is never cut",
    merge=(
        "P = exp2(s * c - m) * (1 / l) with the forward's s, m and l; dP: the run's arithmetic over dO_d v_d, d "
        f"ascending from +0; D = the {LANES}-lane dot of dO and O; dS = P * (dP - D). dQ_i: the run's arithmetic "
        "over bf16(dS_ij) k_j, j ascending; dV_j: over bf16(P_ij) dO_i and dK_j: over bf16(dS_ij) q_i, for the "
        "query rows in the order given and, inside a row, the heads of the group ascending. Every chain starts at "
        "+0 and ends with one + (+0), so that terms of zero (masked pairs) can't show in the sign of a zero. "
        "Under sm90 and cdna3 P = w(fma(s, c, -m)) * (1 / l), and the rows of a key are counted from the first "
        "query row of the sequence, so that groups of k start at multiples of their length"
    ),
    precision="bf16 inputs, fp32 scores and accumulators, bf16 gradients",
    rounding=(
        "P and dS to bf16 for the products; dQ and dK times fp32(scale), then one rounding to bf16; "
        "one rounding of dV to bf16"
    ),
    primitives="fma, +, -, *, correctly rounded /, exp2 (owned)",
    specials="as IEEE says, subnormal numbers kept; a NaN gradient is 0x7fc0; rows outside every sequence give +0",
    constants={"lanes": LANES},
)
