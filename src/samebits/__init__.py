"""samebits: the same log-probability bits in the engine that generates tokens and the engine that trains on them."""

__version__ = "0.1.0"
