"""What rotary promises; the data lie in samebits.contract, which loads without any operator."""

from samebits.contract.boundaries.rotary import ROTARY as ROTARY
from samebits.contract.boundaries.rotary import ROTARY_BACKWARD as ROTARY_BACKWARD
