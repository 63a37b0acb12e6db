"""The order-free log-sum-exp, the log-probability and its gradients."""

from __future__ import annotations

from samebits.contract.boundary import Boundary

WINDOW_BITS = 16  # exponents per window
WINDOWS = 4  # windows kept, counted from the highest one seen
MAX_TERMS = 1 << 20  # terms of one call; each is below 2^39, so a window of 2^24 of them fits 63 bits
MAX_SUM = 1 << 62  # a merged window sum at or above this is refused

T_LIMIT = float(1 << 30)  # t is clamped here, so that exponents fit 32 bits
TOP_LIMIT = 1 << 25  # rows whose top window is outside [-TOP_LIMIT, TOP_LIMIT) have no finite log-sum-exp
EMPTY_TOP = -(1 << 27)  # the top window of a state without terms, below every real one

LOG2_E_LOW = float.fromhex("0x1.4ae0c0p-26")  # log2(e) minus its fp32 rounding, rounded to fp32
LN_2 = float.fromhex("0x1.62e42fefa39efp-1")  # float64
SQRT_2 = float.fromhex("0x1.6a09e667f3bcdp+0")  # float64
ATANH_TERMS = 11  # of the series of the logarithm: what is left out is below 2^-56

LOGPROB = Boundary(
    name="logprob",
    version=1,
    dependency="every real column of one row (padded columns take no part); rows are independent",
    partition="none that matters: a term belongs to the window floor(i / 16) of its own exponent i",
    merge=(
        "order-free: 64-bit integer sums for the 4 highest windows; states align by window and add; "
        "terms of lower windows, each below 2^-48 of the largest term, are dropped"
    ),
    precision=(
        "fp32 logits as the run's arithmetic (fma32, sm90 or cdna3) over the hidden size leaves them (bias added in "
        "fp32); integer state; float64 conversion; fp32 log-probability."
    ),
    rounding=(
        "z = logit / temperature, one division (none at 1); n = nearest(z * log2(e)) clamped to +-2^30; "
        "r = fma(z, log2e_low, fma(z, log2e, -n)) clamped to +-1/2; p = exp2_core(r); the term is the "
        "24-bit significand of p at exponent i = n + exponent(p); logp = float64 z_target - lse rounded "
        "once to fp32, and +0 where that is above 0"
    ),
    primitives=(
        "exp2_core; the conversion uses float64 +, -, *, / only: S = ((s0 * 2^16 + s1) * 2^16 + s2) * 2^16 "
        "+ s3 = m * 2^e with m in (1/sqrt 2, sqrt 2], f = (m - 1) / (m + 1), "
        "ln m = 2 f (1 + f^2/3 + f^4/5 + ...) by Horner, lse = (e + 16 (top - 3) - 23) * ln 2 + ln m"
    ),
    specials=(
        "NaN, +inf or t >= 2^29 in a row: NaN (0x7fc00000). Nothing above t = -2^29: lse = -inf, logp = NaN. A -inf "
        "beside finite logits counts as 0. A target that is no column (-100, one beyond the vocabulary, any int64) "
        "gives +0 and is never used as an index; its row is not read by linear_logp. Padded columns may hold anything"
    ),
    constants={"window_bits": WINDOW_BITS, "windows": WINDOWS, "atanh_terms": ATANH_TERMS},
)

LOGPROB_BACKWARD = Boundary(
    name="logprob_backward",
    version=1,
    dependency="dz[t, v]: upstream[t], logit[t, v], target and log-sum-exp of row t. dhidden[t]: row t of dz and the "
    "real columns of the weight; dw[v], dbias[v]: column v of dz over the active rows",
    partition="none",
    merge="dhidden: the run's arithmetic over columns v ascending from +0; dw: the run's arithmetic over active rows t "
    "ascending from the value that the fp32 buffer holds, its groups counted from the first row of a call; "
    "dbias: + over active rows ascending from the value that the fp32 buffer holds",
    precision="fp32 upstream, logits and lse; bf16 dz, hidden and weight; fp32 sums",
    rounding="dz in fp32 is rounded once to bf16; dhidden is fp32, rounded once to bf16 where hidden is bf16; dw and "
    "dbias stay fp32 in the buffer",
    primitives="dz = upstream * (onehot - exp2((z - lse) * log2e)), then / temperature (none at 1); owned exp2",
    specials="rows whose target is no column are not read and give zeros; padded columns get no gradient; a NaN of "
    "dhidden, dw and dbias is 0x7fc00000 (0x7fc0 in bf16)",
)
