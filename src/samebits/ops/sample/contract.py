"""What sample promises; the data lie in samebits.contract, which loads without any operator."""

from samebits.contract.boundaries.sample import DRAW_BITS as DRAW_BITS
from samebits.contract.boundaries.sample import SAMPLE as SAMPLE
