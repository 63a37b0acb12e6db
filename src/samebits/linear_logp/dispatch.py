"""The one place where a provider is asked, its answer judged, and the same thing decided on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.bits import digest, raw
from samebits.contract import digest_of
from samebits.linear_logp.agree import Verdict, disagreement, exchange, first
from samebits.linear_logp.errors import ProviderRejected, says_unavailable
from samebits.linear_logp.select import Provider, ProviderSettings, load_provider
from samebits.linear_logp.types import LinearLogpRequest, LinearLogpResult
from samebits.linear_logp.validate import check_result, check_strictly, normalise

log = logging.getLogger("samebits.linear_logp")

Scores = tuple[Tensor, Tensor | None]  # logp [T, 1], entropy [T] or None
Native = Callable[[LinearLogpRequest], Scores]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """One call of audit mode, over active rows: how the provider's log-probabilities differ from the native ones."""

    elements: int
    mismatches: int  # fp32 patterns that differ
    max_abs_diff: float  # of finite values
    backend_id: str = ""
    contract_id: str = ""
    error: str = ""  # why there is nothing to compare


class LinearLogp:
    """A provider in one mode, agreed over all ranks of `group`, which must make the same calls in the same order.

    `group` holds every process that must decide alike (tensor-parallel ranks and all others of one trainer);
    verdicts travel on `device`. `calls` counts what was returned, `audits` holds the records of audit mode.
    """

    def __init__(
        self,
        settings: ProviderSettings,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Loads the provider once. Raises ProviderRejected on all ranks when strict mode can't have it or the ranks
        were configured differently; whatever a broken provider raises comes out, and its peers raise too."""
        self.settings = settings
        self.group = group
        self.device = torch.device(device)
        self.calls = {"provider": 0, "native": 0}
        self.audits: list[Audit] = []
        self.identity: tuple[str, str] | None = None
        self._provider = self._load() if settings.path else None

    @property
    def configured(self) -> bool:
        """Whether a provider is in use: without one nothing needs to be captured and no request built."""
        return self._provider is not None

    @property
    def strict(self) -> bool:
        return self.settings.mode == "strict"

    def record(self) -> dict[str, Any]:
        """Plain data for a run's evidence: what was asked for, what served, how often, and what audits found."""
        audited = ((audit.backend_id, audit.contract_id) for audit in self.audits if not audit.error)
        backend, contract = self.identity or next(audited, ("", ""))
        return {
            "provider": self.settings.path or "",
            "mode": self.settings.mode,
            "backend": backend,
            "contract": contract,
            "calls": dict(self.calls),
            "audit": {
                "calls": len(self.audits),
                "elements": sum(audit.elements for audit in self.audits),
                "mismatches": sum(audit.mismatches for audit in self.audits),
                "max_abs_diff": max((audit.max_abs_diff for audit in self.audits), default=0.0),
                "error": next((audit.error for audit in self.audits if audit.error), ""),
            },
        }

    def __call__(self, request: LinearLogpRequest, native: Native) -> Scores:
        """logp [T, 1] and entropy [T] or None: the provider's, or what `native` gives, which applies
        `request.temperature` itself."""
        if self._provider is None:
            return self._native(request, native)
        if self.settings.mode == "audit":
            scores = self._native(request, native)
            self._audit(self._provider, request, scores[0])
            return scores
        result = self._ask(self._provider, request)
        if result is None:
            return self._native(request, native)
        self.calls["provider"] += 1
        return result.logp, result.entropy

    def _native(self, request: LinearLogpRequest, native: Native) -> Scores:
        self.calls["native"] += 1
        return native(request)

    def _load(self) -> Provider | None:
        assert self.settings.path is not None
        name, provider, absent = digest_of(asdict(self.settings)), None, None
        try:
            provider = load_provider(self.settings.path)
            own = Verdict(status="served", settings=name)
        except Exception as error:
            if not says_unavailable(error):
                self._tell(Verdict.of("failed", error))
                raise
            own, absent = Verdict(status="unavailable", settings=name, detail=str(error)), error
        verdicts = self._tell(own)
        problem = first(verdicts, "failed") or disagreement(verdicts, ("settings",))
        if problem:
            raise ProviderRejected(f"linear_logp_provider {self.settings.path!r}: {problem}")
        return provider if self._is_available(verdicts, absent) else None

    def _ask(self, provider: Provider, request: LinearLogpRequest) -> LinearLogpResult | None:
        """The provider's checked result; None when all ranks use native code from now on."""
        result, absent = None, None
        try:
            result = normalise(provider(request))
            self._check(result, request)
            own = self._served(result, request)
        except Exception as error:
            if not says_unavailable(error):
                self._tell(Verdict.of("failed", error))
                raise
            own, absent = Verdict.of("unavailable", error), error
        verdicts = self._tell(own)
        failed = first(verdicts, "failed")
        if failed:
            raise ProviderRejected(f"linear_logp_provider {self.settings.path!r} failed on another rank: {failed}")
        if not self._is_available(verdicts, absent):
            self._provider = None
            return None
        problem = disagreement(verdicts, ("backend", "contract", *(("values",) if self.strict else ())))
        if problem:
            raise ProviderRejected(f"linear_logp_provider {self.settings.path!r}: {problem}")
        assert result is not None
        self._pin(result)
        return result

    def _check(self, result: LinearLogpResult, request: LinearLogpRequest) -> None:
        check_result(result, request)
        if not self.strict:
            return
        check_strictly(result, request)
        route = result.provenance.get("route", "R")
        if route != self.settings.route:
            raise ValueError(f"strict: the provider went route {route!r}, the case declares {self.settings.route!r}")
        expected = self.settings.expected_contract
        if expected is not None and result.contract_id != expected:
            raise ValueError(
                f"strict: scored under contract {result.contract_id!r}, the other side under {expected!r}; "
                "equal numbers would prove nothing"
            )
        if self.identity is not None and self.identity != (result.backend_id, result.contract_id):
            raise ValueError(
                f"strict: backend and contract are {(result.backend_id, result.contract_id)}, at first they were "
                f"{self.identity}; an identity is pinned for the whole run"
            )

    def _served(self, result: LinearLogpResult, request: LinearLogpRequest) -> Verdict:
        replica, values = "", ""
        group = request.tensor_parallel_group
        if self.strict and group is not None and group.size() > 1:
            replica = ",".join(str(rank) for rank in dist.get_process_group_ranks(group))
            scores = result.logp.detach() if request.active is None else result.logp.detach()[request.active]
            values = digest(scores.cpu())
        return Verdict(
            status="served", backend=result.backend_id, contract=result.contract_id, replica=replica, values=values
        )

    def _is_available(self, verdicts: list[Verdict], absent: Exception | None) -> bool:
        """False, said once, when some rank can't use the provider and all go native; ProviderRejected in strict
        mode, and when the provider served before."""
        reason = first(verdicts, "unavailable")
        if reason is None:
            return True
        if self.strict:
            raise ProviderRejected(
                f"strict: linear_logp_provider {self.settings.path!r} is unavailable: {reason}"
            ) from absent
        if self.identity is not None:
            raise ProviderRejected(
                f"linear_logp_provider {self.settings.path!r} served before and is unavailable now ({reason}); "
                "a run does not mix two arithmetics"
            ) from absent
        log.warning("provider %s is unavailable (%s): native code from here on", self.settings.path, reason)
        return False

    def _pin(self, result: LinearLogpResult) -> None:
        if self.identity is None:
            self.identity = (result.backend_id, result.contract_id)
            log.info("provider %s: backend %s, contract %s", self.settings.path, *self.identity)

    def _tell(self, own: Verdict) -> list[Verdict]:
        return exchange(own, self.group, self.device)

    def _audit(self, provider: Provider, request: LinearLogpRequest, native: Tensor) -> None:
        """Runs the provider beside the native result. A failure is recorded and ends the audit on all ranks."""
        with torch.no_grad(), torch.random.fork_rng(devices=_random_devices(native)):
            try:
                result = normalise(provider(request))
                check_result(result, request)
                own, record = Verdict(status="served"), _difference(result, request, native)
            except Exception as error:
                own, record = Verdict.of("failed", error), _nothing(f"{type(error).__name__}: {error}")
                log.warning("audit of %s: %s", self.settings.path, record.error, exc_info=True)
        self.audits.append(record)
        if first(self._tell(own), "failed"):
            self._provider = None


def _difference(result: LinearLogpResult, request: LinearLogpRequest, native: Tensor) -> Audit:
    rows = request.active_rows()
    ours, theirs = result.logp.detach()[rows].float(), native.detach()[rows].float()
    distance = (ours.double() - theirs.double()).abs()
    distance = distance[distance.isfinite()]
    return Audit(
        elements=ours.numel(),
        mismatches=int((raw(ours) != raw(theirs)).sum()),
        max_abs_diff=float(distance.max()) if distance.numel() else 0.0,
        backend_id=result.backend_id,
        contract_id=result.contract_id,
    )


def _nothing(error: str) -> Audit:
    return Audit(elements=0, mismatches=0, max_abs_diff=0.0, error=error)


def _random_devices(tensor: Tensor) -> list[torch.device]:
    return [] if tensor.device.type == "cpu" else [tensor.device]
