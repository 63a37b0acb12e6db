"""What sample_support promises; the data lie in samebits.contract, which loads without any operator."""

from samebits.contract.boundaries.sample_support import MASS_BITS as MASS_BITS
from samebits.contract.boundaries.sample_support import SAMPLE_SUPPORT as SAMPLE_SUPPORT
