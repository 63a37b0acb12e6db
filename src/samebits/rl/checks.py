"""What must hold before two log-probabilities may be compared. A check names the first fault it finds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from samebits.contract import RunContract, digest_of, refusal
from samebits.evidence.routes import is_strict, process_name, routes_of
from samebits.rl.protocols import RunFailed
from samebits.timeline.types import GenerateRequest, Rollout, StepResult, TrainSample, WeightVersion


def check_rollouts(
    requests: Sequence[GenerateRequest], rollouts: Sequence[Rollout], version: WeightVersion, contract: str
) -> None:
    """Every request answered once, with tokens, one log-probability each, all under the live version."""
    if len(rollouts) != len(requests):
        raise RunFailed(f"{len(rollouts)} rollouts for {len(requests)} requests")
    for request, rollout in zip(requests, rollouts, strict=True):
        name = f"sample {request.key}"
        if rollout.key != request.key or rollout.prompt_ids != request.prompt_ids:
            raise RunFailed(f"{name}: the engine answered for another sample or prompt ({rollout.key})")
        if not rollout.token_ids:
            raise RunFailed(f"{name}: the engine returned no token, so there is nothing to compare")
        if len(rollout.token_ids) > request.max_tokens:
            raise RunFailed(f"{name}: {len(rollout.token_ids)} tokens, at most {request.max_tokens} wanted")
        if request.forced and rollout.token_ids != request.forced:
            raise RunFailed(f"{name}: the engine did not produce the {len(request.forced)} recorded tokens")
        if len(rollout.logp_bits) != len(rollout.token_ids):
            raise RunFailed(f"{name}: {len(rollout.logp_bits)} log-probabilities for {len(rollout.token_ids)} tokens")
        if rollout.version != version:
            raise RunFailed(f"{name}: generated under weights {rollout.version}, this step uses {version}")
        if rollout.contract != contract:
            raise RunFailed(
                f"{name}: scored under run contract {rollout.contract[:12] or 'none'}, want {contract[:12] or 'none'}"
            )
        problem = _support_problem(request, rollout)
        if problem:
            raise RunFailed(f"{name}: {problem}")


def _support_problem(request: GenerateRequest, rollout: Rollout) -> str:
    """What is wrong with the ids that the engine says it kept; empty when nothing is."""
    support = rollout.support
    if support is None:
        return "it came without supports, though top_k, top_p or min_p limits every token" if request.limited else ""
    if not request.limited:
        return "it came with supports, though nothing limits its tokens"
    if min(support.counts, default=0) < 1:
        return "a token without a support, though top_k, top_p or min_p limits every one"
    return support.problem(rollout.token_ids)


def check_result(step: int, samples: Sequence[TrainSample], result: StepResult) -> None:
    """The trainer answered for exactly these samples and tokens, and its scalars are numbers."""
    if result.step != step:
        raise RunFailed(f"the trainer answered for step {result.step}, want step {step}")
    keys = [sample.key for sample in samples]
    if set(result.logp_bits) != set(keys) or len(set(keys)) != len(keys):
        missing = [str(key) for key in keys if key not in result.logp_bits]
        raise RunFailed(
            f"step {step}: the trainer scored {len(result.logp_bits)} of {len(keys)} samples; "
            f"missing: {', '.join(missing[:4]) or 'none, but others came'}"
        )
    for sample in samples:
        scored = len(result.logp_bits[sample.key])
        if scored != sample.response_length:
            raise RunFailed(f"sample {sample.key}: the trainer scored {scored} tokens of {sample.response_length}")
    for name in ("loss", "policy_loss", "kl", "grad_norm", "clip_fraction", "ratio_mean"):
        value = getattr(result, name)
        if not math.isfinite(value):
            raise RunFailed(f"step {step}: the trainer's {name} is {value}; try a smaller lr")


def check_contracts(records: Iterable[Mapping[str, Any]], cases: Mapping[str, str], contract: RunContract) -> None:
    """Every process goes the declared routes, and serves this run contract where one of them is R.

    The refusal prints the differing fields side by side, from what the process itself says that it computes.
    """
    for record in records:
        name = process_name(record)
        routes = routes_of(cases, record["role"])
        for module, served in record["modules"].items():
            wanted = routes.get(served["group"], served["route"])
            if served["route"] != wanted:
                raise RunFailed(f"{name}: {module} goes route {served['route']}, declared is {wanted}")
        if is_strict(record):
            _check_handshake(name, record, contract)


def _check_handshake(name: str, record: Mapping[str, Any], contract: RunContract) -> None:
    digest, content = record["contract"], record["contract_content"]
    if digest != digest_of(content):
        raise RunFailed(f"{name} says that it serves run contract {digest[:12]}, but shows another one's content")
    if digest != contract.digest():
        raise RunFailed(refusal(name, contract.as_data(), content))
