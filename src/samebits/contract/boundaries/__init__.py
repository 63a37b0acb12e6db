"""Every boundary of a dense decoder, in the order in which a token meets them, then those of training alone.

They lie here and not beside their operators, so that a contract can be read, hashed and shown without loading one.
"""

from __future__ import annotations

from samebits.contract.boundaries.attention import ATTENTION, ATTENTION_BACKWARD
from samebits.contract.boundaries.embedding import EMBEDDING, EMBEDDING_BACKWARD
from samebits.contract.boundaries.linear import LINEAR, LINEAR_GRADIENT
from samebits.contract.boundaries.logprob import LOGPROB, LOGPROB_BACKWARD
from samebits.contract.boundaries.rms_norm import RMS_NORM, RMS_NORM_BACKWARD
from samebits.contract.boundaries.rotary import ROTARY, ROTARY_BACKWARD
from samebits.contract.boundaries.sample import SAMPLE
from samebits.contract.boundaries.sample_support import SAMPLE_SUPPORT
from samebits.contract.boundaries.swiglu import SWIGLU, SWIGLU_BACKWARD

BOUNDARIES = (
    EMBEDDING,
    RMS_NORM,
    LINEAR,
    ROTARY,
    ATTENTION,
    SWIGLU,
    LOGPROB,
    SAMPLE_SUPPORT,
    SAMPLE,
    EMBEDDING_BACKWARD,
    RMS_NORM_BACKWARD,
    LINEAR_GRADIENT,
    ROTARY_BACKWARD,
    ATTENTION_BACKWARD,
    SWIGLU_BACKWARD,
    LOGPROB_BACKWARD,
)
