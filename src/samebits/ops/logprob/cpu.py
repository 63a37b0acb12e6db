"""The C++ kernels, called by address."""

from samebits.ops.logprob.reference import finish as finish
from samebits.ops.logprob.reference import linear_backward as linear_backward
from samebits.ops.logprob.reference import linear_state as linear_state
from samebits.ops.logprob.reference import logprob as logprob
from samebits.ops.logprob.reference import lse as lse
from samebits.ops.logprob.reference import state as state
