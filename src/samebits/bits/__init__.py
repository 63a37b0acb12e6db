"""Comparing and naming tensors by their bits."""

from samebits.bits.same import Difference as Difference
from samebits.bits.same import assert_same as assert_same
from samebits.bits.same import digest as digest
from samebits.bits.same import digests as digests
from samebits.bits.same import first_difference as first_difference
from samebits.bits.same import part_digests as part_digests
from samebits.bits.same import raw as raw
