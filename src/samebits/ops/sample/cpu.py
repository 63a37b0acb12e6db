"""The C++ kernels, called by address."""

from samebits.ops.sample.reference import sample_and_logprob as sample_and_logprob
