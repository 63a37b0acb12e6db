"""What a sample says about how its tokens were drawn, checked before anything is scored by it."""

from __future__ import annotations

from samebits.timeline.types import TrainSample


def check_sampling(sample: TrainSample, vocab: int, *, native: bool) -> None:
    """Raise ValueError for a support without its token, an id beyond the vocabulary, a temperature that is no divisor,
    and for any support on the native route, which renormalises over nothing."""
    name = f"sample {sample.key}"
    if sample.temperature is not None and not 0 < sample.temperature < float("inf"):
        raise ValueError(
            f"{name}: temperature {sample.temperature}; want a positive one (a greedy token is scored at 1, as the "
            "rollout engine does, and teaches nothing about the distribution that it came from)"
        )
    support = sample.support
    if support is None:
        return
    if native:
        raise ValueError(
            f"{name}: it was drawn from a support, but Megatron-Core's own log-probability does not renormalise; "
            "set the case of logp to R"
        )
    problem = support.problem(sample.token_ids[sample.prompt_length :])
    if not problem and max(support.ids, default=0) >= vocab:
        problem = f"its support names id {max(support.ids)}, the vocabulary is [0, {vocab})"
    if problem:
        raise ValueError(f"{name}: {problem}")
