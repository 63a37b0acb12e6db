"""WHAT is promised: the six behaviours of each boundary as data, with versions and digests."""

from samebits.contract.boundary import BEHAVIOURS as BEHAVIOURS
from samebits.contract.boundary import Boundary as Boundary
from samebits.contract.boundary import canonical_json as canonical_json
from samebits.contract.boundary import digest_of as digest_of
from samebits.contract.handshake import held_contract as held_contract
from samebits.contract.handshake import model_constants as model_constants
from samebits.contract.handshake import refusal as refusal
from samebits.contract.run import RunContract as RunContract
from samebits.contract.run import differences as differences
from samebits.contract.run import run_contract as run_contract
