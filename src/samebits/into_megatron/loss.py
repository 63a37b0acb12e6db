"""The objective per active token: PPO's clipped surrogate with group advantages, and KL to the reference model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTerms:
    """Per active token, fp32 [n]: what is differentiated, and what is reported."""

    loss: Tensor
    policy: Tensor
    kl: Tensor
    ratio: Tensor
    clipped: Tensor


def token_terms(
    logp: Tensor,
    rollout_logp: Tensor,
    advantage: Tensor,
    reference_logp: Tensor | None,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
) -> TokenTerms:
    """The terms of each token from fp32 [n] log-probabilities and advantages.

    The ratio is exp(logp - rollout_logp): exactly 1 where both have the same bits. KL is the k3 estimate
    exp(d) - d - 1 with d = reference - logp; without a reference it is zero.
    """
    ratio = torch.exp(logp - rollout_logp)
    free = ratio * advantage
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    policy = -torch.minimum(free, bounded)
    if reference_logp is None:
        kl = torch.zeros_like(policy)
    else:
        difference = reference_logp - logp
        kl = torch.exp(difference) - difference - 1.0
    return TokenTerms(
        loss=policy + kl_coef * kl,
        policy=policy.detach(),
        kl=kl.detach(),
        ratio=ratio.detach(),
        clipped=(bounded < free).detach().to(torch.float32),
    )
