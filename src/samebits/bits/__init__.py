"""Comparing and naming tensors by their bits."""

from samebits.bits.same import Difference as Difference
from samebits.bits.same import assert_same as assert_same
from samebits.bits.same import digest as digest
from samebits.bits.same import first_difference as first_difference
from samebits.bits.same import raw as raw
from samebits.bits.tree import part_digests as part_digests
from samebits.bits.tree import tree_digest as tree_digest
from samebits.bits.tree import tree_digests as tree_digests
