"""What attention promises; the data lie in samebits.contract, which loads without any operator."""

from samebits.contract.boundaries.attention import ATTENTION as ATTENTION
from samebits.contract.boundaries.attention import ATTENTION_BACKWARD as ATTENTION_BACKWARD
from samebits.contract.boundaries.attention import CHUNK as CHUNK
from samebits.contract.boundaries.attention import LANES as LANES
from samebits.contract.boundaries.attention import LEAST_EXPONENT as LEAST_EXPONENT
from samebits.contract.boundaries.attention import SUM_LANES as SUM_LANES
from samebits.contract.boundaries.attention import TILE as TILE
from samebits.contract.boundaries.attention import WEIGHT_COEFFICIENTS as WEIGHT_COEFFICIENTS
