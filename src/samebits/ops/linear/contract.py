"""What linear promises; the data lie in samebits.contract, which loads without any operator."""

from samebits.contract.boundaries.linear import LINEAR as LINEAR
from samebits.contract.boundaries.linear import LINEAR_GRADIENT as LINEAR_GRADIENT
