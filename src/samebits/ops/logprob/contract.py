"""What logprob promises; the data lie in samebits.contract, which loads without any operator."""

from samebits.contract.boundaries.logprob import ATANH_TERMS as ATANH_TERMS
from samebits.contract.boundaries.logprob import EMPTY_TOP as EMPTY_TOP
from samebits.contract.boundaries.logprob import LN_2 as LN_2
from samebits.contract.boundaries.logprob import LOG2_E_LOW as LOG2_E_LOW
from samebits.contract.boundaries.logprob import LOGPROB as LOGPROB
from samebits.contract.boundaries.logprob import LOGPROB_BACKWARD as LOGPROB_BACKWARD
from samebits.contract.boundaries.logprob import MAX_SUM as MAX_SUM
from samebits.contract.boundaries.logprob import MAX_TERMS as MAX_TERMS
from samebits.contract.boundaries.logprob import SQRT_2 as SQRT_2
from samebits.contract.boundaries.logprob import T_LIMIT as T_LIMIT
from samebits.contract.boundaries.logprob import TOP_LIMIT as TOP_LIMIT
from samebits.contract.boundaries.logprob import WINDOW_BITS as WINDOW_BITS
from samebits.contract.boundaries.logprob import WINDOWS as WINDOWS
