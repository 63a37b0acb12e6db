"""Two models or routes given by hand, compared on one sequence: the engine writes it, unless it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.locate.hosting import Setting, hosted
from samebits.locate.model import Decoder
from samebits.locate.session import Answered, Question, Session
from samebits.locate.sides import RolloutHosts, TrainerHosts
from samebits.rl.job import Parts
from samebits.rl.processes import Group
from samebits.scratch import scratch_folder
from samebits.timeline.types import GenerateRequest, SampleKey
from samebits.trace import TracedSequence


@dataclass(frozen=True, kw_only=True)
class Given:
    """A prompt, and its response if there is one; else `max_tokens` are generated under `seed`."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    max_tokens: int
    seed: int


def locate_between(
    parts: Parts, trainer: Setting, rollout: Setting, given: Given, folder: Path, say: Callable[[str], None]
) -> Answered:
    """Both sides compute one sequence. Raises ValueError for settings that can't be served, RunFailed for a failure."""
    decoder = Decoder.read(trainer.inputs.model, trainer.config.segments)
    decoder.check_sizes(Decoder.read(rollout.inputs.model, rollout.config.segments))
    say("starting both sides")
    with (
        scratch_folder() as scratch,
        hosted(parts, trainer, rollout, 0, folder, scratch) as (ranks, engines),
    ):
        timeout = rollout.config.step_timeout
        response = given.response or _generate(engines, given, rollout.config.temperature, timeout)
        sequence = TracedSequence("0", (*given.prompt, *response), len(given.prompt), rollout.config.temperature)
        say(f"tracing {len(sequence.token_ids)} tokens")
        session = Session(TrainerHosts(ranks, timeout), RolloutHosts(engines, timeout), decoder, scratch)
        return session.locate(Question(sequences=[sequence], number=0, last=len(sequence.token_ids) - 1))


def _generate(engines: Group, given: Given, temperature: float, timeout: float) -> Sequence[int]:
    request = GenerateRequest(
        key=SampleKey(0, 0, 0),
        prompt_ids=given.prompt,
        seed=given.seed,
        max_tokens=given.max_tokens,
        temperature=temperature,
        stop_ids=(),
    )
    ((rollout,),) = engines.everyone("generate", [request], timeout=timeout)
    return tuple(rollout.token_ids)
