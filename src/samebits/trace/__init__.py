"""What every boundary of one forward pass read and wrote, token by token, as digests that add up over ranks."""

from samebits.trace.digest import prefix_digests as prefix_digests
from samebits.trace.digest import row_digests as row_digests
from samebits.trace.points import Point as Point
from samebits.trace.points import Site as Site
from samebits.trace.points import sites as sites
from samebits.trace.recorder import Entry as Entry
from samebits.trace.recorder import Recorder as Recorder
from samebits.trace.recorder import Rows as Rows
from samebits.trace.side import SideTrace as SideTrace
from samebits.trace.side import Token as Token
from samebits.trace.side import TracedSequence as TracedSequence
from samebits.trace.side import assemble as assemble
