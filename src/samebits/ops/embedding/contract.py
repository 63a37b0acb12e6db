"""What embedding promises; the data lie in samebits.contract, which loads without any operator."""

from samebits.contract.boundaries.embedding import EMBEDDING as EMBEDDING
from samebits.contract.boundaries.embedding import EMBEDDING_BACKWARD as EMBEDDING_BACKWARD
