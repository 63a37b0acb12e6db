"""What swiglu promises; the data lie in samebits.contract, which loads without any operator."""

from samebits.contract.boundaries.swiglu import SWIGLU as SWIGLU
from samebits.contract.boundaries.swiglu import SWIGLU_BACKWARD as SWIGLU_BACKWARD
