"""Every boundary of a dense decoder, in the order in which a token meets them, then those of training alone."""

from __future__ import annotations

from samebits.ops.attention.contract import ATTENTION, ATTENTION_BACKWARD
from samebits.ops.embedding.contract import EMBEDDING
from samebits.ops.linear.contract import LINEAR, LINEAR_GRADIENT
from samebits.ops.logprob.contract import LOGPROB
from samebits.ops.rms_norm.contract import RMS_NORM
from samebits.ops.rotary.contract import ROTARY
from samebits.ops.sample.contract import SAMPLE
from samebits.ops.sample_support.contract import SAMPLE_SUPPORT
from samebits.ops.swiglu.contract import SWIGLU

BOUNDARIES = (
    EMBEDDING,
    RMS_NORM,
    LINEAR,
    ROTARY,
    ATTENTION,
    SWIGLU,
    LOGPROB,
    SAMPLE_SUPPORT,
    SAMPLE_SUPPORT,
    SAMPLE,
    LINEAR_GRADIENT,
    ATTENTION_BACKWARD,
)
