"""vime as the trainer's framework: `samebits.into_vime.provider` is the dotted path for `--linear-logp-provider`."""

from __future__ import annotations

from typing import Any

from samebits.into_vime.requests import to_request
from samebits.linear_logp import LinearLogpResult
from samebits.linear_logp.provider import provider as own_provider


def provider(request: Any) -> LinearLogpResult:
    """Scores a request object of vime's own, of any published revision; vime need not be installed.

    Raises an exception that vime reads as "unavailable" for what cannot be served under the contract: no context,
    a support or a temperature that travels in metadata, other dtypes. In auto mode vime then uses its own code, in
    strict mode it stops.
    """
    return own_provider(to_request(request))
