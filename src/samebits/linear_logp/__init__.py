"""The provider boundary: a framework owns tokens, masks and loss; a provider owns the numerics of log-probability."""

from samebits.linear_logp.dispatch import Audit as Audit
from samebits.linear_logp.dispatch import LinearLogp as LinearLogp
from samebits.linear_logp.errors import LinearLogpProviderUnavailable as LinearLogpProviderUnavailable
from samebits.linear_logp.errors import ProviderRejected as ProviderRejected
from samebits.linear_logp.select import ProviderSettings as ProviderSettings
from samebits.linear_logp.types import LinearLogpContext as LinearLogpContext
from samebits.linear_logp.types import LinearLogpRequest as LinearLogpRequest
from samebits.linear_logp.types import LinearLogpResult as LinearLogpResult
from samebits.linear_logp.types import LinearProjection as LinearProjection
from samebits.linear_logp.types import TokenLayout as TokenLayout
from samebits.linear_logp.types import VocabPartition as VocabPartition
