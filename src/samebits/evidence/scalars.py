"""A run's events as named numbers per step, under the names that the field uses (those of verl). No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from samebits.timeline.events import Compared, Evaluated, Event, Measured, Sampled, Timed, Trained

PHASES = {"generate": "gen", "reward": "reward", "train": "update_actor", "compare": "compare", "publish": "sync"}
_DRIFT = {
    "ratio_min": "rollout_corr/rollout_is_min",
    "ratio_mean": "rollout_corr/rollout_is_mean",
    "ratio_max": "rollout_corr/rollout_is_max",
    "is_truncated_fraction": "rollout_corr/rollout_is_ratio_fraction_high",
    "kl_k1": "rollout_corr/kl",
    "kl_k2": "rollout_corr/k2_kl",
    "kl_k3": "rollout_corr/k3_kl",
    "clip_fraction": "rollout_corr/pg_clipfrac_uncorrected",
    "clip_fraction_corrected": "rollout_corr/pg_clipfrac_corrected",
}


@dataclass(kw_only=True)
class Scalars:
    """Collects a step's lines; `take` hands out (step, numbers) when the step, or an evaluation, is complete."""

    _samples: list[Sampled] = field(default_factory=list)
    _values: dict[str, float] = field(default_factory=dict)

    def take(self, event: Event) -> tuple[int, dict[str, float]] | None:
        match event:
            case Sampled():
                self._samples.append(event)
            case Trained():
                self._values |= _trained(event)
            case Compared():
                self._values |= _compared(event)
            case Measured():
                self._values |= {_drift_name(name): value for name, value in event.metrics.items()}
            case Timed():
                found = {**_sampled(self._samples), **self._values, **_timed(event, self._samples)}
                self._samples, self._values = [], {}
                return event.step, found
            case Evaluated():
                return event.step, {
                    "val-core/accuracy/mean": event.accuracy,
                    "val-aux/response_length/mean": event.mean_response_length,
                }
            case _:
                pass
        return None


def _drift_name(name: str) -> str:
    return _DRIFT.get(name, f"training/{name.replace('logp_abs', 'rollout_logp_abs')}")


def _trained(event: Trained) -> dict[str, float]:
    return {
        "actor/loss": event.loss,
        "actor/pg_loss": event.policy_loss,
        "actor/kl_loss": event.kl,
        "actor/grad_norm": event.grad_norm,
        "actor/pg_clipfrac": event.clip_fraction,
    }


def _compared(event: Compared) -> dict[str, float]:
    counts: dict[str, float] = {
        "samebits/mismatch_count": event.mismatch_count,
        "samebits/compared_tokens": event.compared_tokens,
        "samebits/nonfinite_count": event.nonfinite_count,
    }
    if event.nonfinite_count == event.compared_tokens:
        return counts
    return counts | {
        "training/rollout_logp_abs_diff_max": event.max_abs_diff,
        "training/rollout_logp_abs_diff_mean": event.mean_abs_diff,
    }


def _sampled(samples: list[Sampled]) -> dict[str, float]:
    if not samples:
        return {}
    rewards = [sample.reward for sample in samples]
    lengths = [sample.response_length for sample in samples]
    return {
        "critic/rewards/mean": math.fsum(rewards) / len(rewards),
        "critic/rewards/max": max(rewards),
        "critic/rewards/min": min(rewards),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": max(lengths),
        "response_length/clip_ratio": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        "prompt_length/mean": sum(sample.prompt_length for sample in samples) / len(samples),
    }


def _timed(event: Timed, samples: list[Sampled]) -> dict[str, float]:
    total = math.fsum(event.seconds.values())
    tokens = event.generated_tokens + sum(sample.prompt_length for sample in samples)
    found = {f"timing_s/{PHASES.get(name, name)}": seconds for name, seconds in event.seconds.items()}
    found |= {"timing_s/step": total, "perf/total_num_tokens": float(tokens)}
    generating = event.seconds.get("generate", 0.0)
    if total > 0 and generating > 0:
        found["perf/throughput"] = tokens / total
        found["perf/generated_tokens_per_second"] = event.generated_tokens / generating
    return found
