"""The two ways in which a provider's answer is not used."""

from __future__ import annotations

UNAVAILABLE = "linear_logp_provider_unavailable"


class LinearLogpProviderUnavailable(RuntimeError):
    """A provider says: I cannot serve this. Callers test the attribute, so that a provider may have its own class."""

    linear_logp_provider_unavailable = True


class ProviderRejected(RuntimeError):
    """A provider, its answer or a peer's broke a rule of the boundary; raised on every rank. The message names it."""


def says_unavailable(error: BaseException) -> bool:
    """Whether an exception is a provider's own word that it cannot serve, whatever its class."""
    return getattr(error, UNAVAILABLE, False) is True
