"""Which ids a sampler may draw from."""

from __future__ import annotations

from samebits.contract.boundaries.logprob import WINDOW_BITS, WINDOWS
from samebits.contract.boundary import Boundary

MASS_BITS = 64  # of the fixed-point form of top_p

SAMPLE_SUPPORT = Boundary(
    name="sample_support",
    version=1,
    dependency="the fp32 logits of one row, its temperature, min_p, top_k and top_p; nothing else",
    partition="none: an order of the row's ids, and integer terms (boundary logprob)",
    merge=(
        "temperature, then min-p, top-k, top-p, each a shorter prefix of one order: z = logit / temperature "
        "descending (-0 equals +0), equal z by ascending id; -inf is in no support. min-p ends before the first "
        "term below min_p times the first term; top-k ends after k ids (0: no limit); top-p ends after the first "
        "id, at least one, whose running total P of terms reaches the sum S of those that min-p and top-k left: "
        "P >= ceil(S F / 2^64); at 1 it cuts nothing. Temperature 0: no limit applies"
    ),
    precision=(
        "exact: fp32 comparisons of z; terms are 24-bit integers at an exponent, min_p (fp32) times a term has 48 "
        "bits; P and S are integers in units of the row's lowest kept window, dropped windows count as 0"
    ),
    rounding=(
        "z as in logprob; F = floor(top_p 2^64) for top_p as fp32. Over the support: the draw is that of sample "
        "with the kept ids as the row; log-probability and gradients are those of logprob and logprob_backward with "
        "the kept columns as the row, and all other columns get no gradient"
    ),
    primitives="terms as in logprob; comparisons, integer sums and products",
    specials="a row with NaN or +inf, or with nothing finite, has no distribution: the call is refused. A -inf is in "
    "no support; what is not in its row's support has log-probability -inf",
    constants={"window_bits": WINDOW_BITS, "windows": WINDOWS, "mass_bits": MASS_BITS},
)
