"""WHO computes: the backends of an op, chosen by name or device, refused with a reason. There is no fallback."""

from samebits.backends.outside import announced as announced
from samebits.backends.outside import register as register
from samebits.backends.select import ARITHMETICS as ARITHMETICS
from samebits.backends.select import Backends as Backends
from samebits.backends.select import NoBackend as NoBackend
from samebits.backends.select import device_arithmetic as device_arithmetic
from samebits.backends.select import lazy as lazy
from samebits.backends.select import pick as pick
from samebits.backends.select import pick_arithmetic as pick_arithmetic
from samebits.backends.select import serve_only as serve_only
