"""What ranks tell each other: moves carry bits, trees add fp32 partial sums in the contract's order.

Nothing else crosses ranks in a forward pass. Every function takes a `torch.distributed` process group and is
free when the group has one rank. `attach` chooses who carries the bytes of a group, and how its failures show.
"""

from samebits.collectives.errors import CollectiveError as CollectiveError
from samebits.collectives.errors import RankFailed as RankFailed
from samebits.collectives.errors import RankLate as RankLate
from samebits.collectives.errors import RankLost as RankLost
from samebits.collectives.errors import RanksDisagree as RanksDisagree
from samebits.collectives.fold import fold_neighbours as fold_neighbours
from samebits.collectives.moves import all_gather_rows as all_gather_rows
from samebits.collectives.moves import gather_ragged as gather_ragged
from samebits.collectives.moves import gather_states as gather_states
from samebits.collectives.moves import scatter_rows as scatter_rows
from samebits.collectives.moves import select_owner as select_owner
from samebits.collectives.transport import HOST_TRANSPORTS as HOST_TRANSPORTS
from samebits.collectives.transport import TRANSPORTS as TRANSPORTS
from samebits.collectives.transport import TransportName as TransportName
from samebits.collectives.transport import attach as attach
from samebits.collectives.transport import check as check
from samebits.collectives.transport import detach as detach
from samebits.collectives.transport import shared_fate as shared_fate
from samebits.collectives.tree import copy_to_group as copy_to_group
from samebits.collectives.tree import gather_rows as gather_rows
from samebits.collectives.tree import tree_all_reduce as tree_all_reduce
from samebits.collectives.tree import tree_all_reduce_bf16 as tree_all_reduce_bf16
from samebits.collectives.tree import tree_reduce_scatter as tree_reduce_scatter
