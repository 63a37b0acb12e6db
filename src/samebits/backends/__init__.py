"""WHO computes: the backends of an op, chosen by name, refused with a reason. There is no fallback."""

from samebits.backends.select import NoBackend as NoBackend
from samebits.backends.select import pick as pick
