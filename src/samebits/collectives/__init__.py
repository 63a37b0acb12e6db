"""What ranks tell each other: moves carry bits, trees add fp32 partial sums in the contract's order.

Nothing else crosses ranks in a forward pass. Every function takes a `torch.distributed` process group and is
free when the group has one rank.
"""

from samebits.collectives.moves import all_gather_rows as all_gather_rows
from samebits.collectives.moves import gather_ragged as gather_ragged
from samebits.collectives.moves import gather_states as gather_states
from samebits.collectives.moves import scatter_rows as scatter_rows
from samebits.collectives.moves import select_owner as select_owner
from samebits.collectives.tree import copy_to_group as copy_to_group
from samebits.collectives.tree import fold_neighbours as fold_neighbours
from samebits.collectives.tree import gather_rows as gather_rows
from samebits.collectives.tree import tree_all_reduce as tree_all_reduce
from samebits.collectives.tree import tree_reduce_scatter as tree_reduce_scatter
