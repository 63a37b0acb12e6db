"""What can go wrong between ranks. Each message names the rank to look at; after one, the group is of no more use."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """A collective did not come about. All ranks of the group raise one of the kinds below."""


class RankFailed(CollectiveError):
    """Another rank met an error before it reached this collective: which rank, and its error."""


class RankLost(CollectiveError):
    """The process of another rank ended, or it left the group, while it was still needed."""


class RankLate(CollectiveError):
    """Another rank did not come within the time-out."""


class RanksDisagree(CollectiveError):
    """The ranks came to one collective with different operations or sizes."""
