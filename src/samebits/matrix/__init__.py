"""Many layouts of one job: do all pairs of a trainer layout and a rollout layout give the same bits?"""

from samebits.matrix.plan import Matrix as Matrix
from samebits.matrix.plan import read_matrix as read_matrix
from samebits.matrix.runner import run_matrix as run_matrix
