"""A run that was recorded, brought back: its settings, its weights at any step, its tokens, its log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samebits.contract import refusal
from samebits.evidence.sidecar import StepSample, read_step, sidecar_name
from samebits.evidence.store import MANIFEST, TIMELINE
from samebits.evidence.verdict import Verdict
from samebits.locate.hosting import Setting, hosted
from samebits.locate.model import Decoder
from samebits.locate.result import Located
from samebits.locate.search import coverage, first_divergence
from samebits.locate.session import Answered, Question, Session
from samebits.locate.sides import RolloutHosts, TrainerHosts
from samebits.rl.config import RunConfig, load_config
from samebits.rl.inputs import resolve_inputs
from samebits.rl.job import Parts
from samebits.rl.processes import Group
from samebits.rl.protocols import RunFailed
from samebits.rl.publication import version_of
from samebits.rl.sides import TrainerGroup
from samebits.rl.step_trace import trace_name
from samebits.scratch import scratch_folder
from samebits.timeline.events import Event, Published, Sampled, parse_json
from samebits.timeline.ledger import read
from samebits.timeline.types import SampleKey, TrainSample
from samebits.trace import SideTrace, TracedSequence
from samebits.trace.files import read_traces

_ALL_IDS = (
    "the run's log-probabilities are over the ids that top_k, top_p or min_p kept, here they are over all ids: recorded"
    " ones do not come out again, and what was kept is not compared"
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The step, the number of the sample in it, and the response token to explain."""

    step: int
    number: int
    token: int


class RecordedRun:
    """What a run directory holds, as far as it can be computed again."""

    def __init__(self, run: Path, parts: Parts, provider: str | None = None) -> None:
        """`provider` is one that may be imported, besides our own.

        Raises ValueError when the records can't be read, name another provider, or when the model or the contract are
        no longer the run's.
        """
        self._run, self._parts = run, parts
        if not (run / MANIFEST).is_file() or not (run / TIMELINE).is_file():
            raise ValueError(f"{run} holds no run: {MANIFEST} or {TIMELINE} is missing")
        manifest = parse_json((run / MANIFEST).read_bytes())
        try:
            agreed, files = manifest["contract"]["content"], dict(manifest["inputs"]["model"]["files"])
            self.config = as_it_was_read(load_config(manifest["config"]), manifest["inputs"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{run / MANIFEST} is no manifest of a run: {error!r}") from error
        named = self.config.linear_logp_provider
        if f"{named}.".partition(".")[0] != "samebits" and named != provider:
            raise ValueError(
                f"the run names the provider {named!r}, and a record does not decide what is imported: "
                f"if you trust it, give --linear-logp-provider {named}"
            )
        inputs = resolve_inputs(self.config)
        contract = parts.contract(self.config, inputs)
        problem = refusal("this installation", agreed, contract.as_data())
        if problem:
            raise ValueError(problem)
        held = inputs.fingerprints()["model"]["files"]
        changed = [name for name, digest in files.items() if held.get(name) != digest]
        if changed:
            raise ValueError(f"{inputs.model}: {', '.join(changed)} changed since the run; its start can't be rebuilt")
        self.setting = Setting(config=self.config, inputs=inputs, contract=contract)
        self.events: Sequence[Event] = read(run / TIMELINE).events

    def samples(self, step: int) -> list[StepSample]:
        """The samples of one step, in order. Raises ValueError when the step was not recorded."""
        path = self._run / sidecar_name(step)
        if not path.is_file():
            raise ValueError(f"{self._run}: step {step} was not recorded")
        return read_step(path)

    def target(self, sample: str | None, token: int | None) -> Target:
        """The token to explain: as asked for, or the first that differs, or the last of the first response.

        `sample` is step/prompt/sample, as reports name it, with or without @token. Raises ValueError for one that the
        run does not hold.
        """
        if sample is None:
            return self._first_mismatch(token)
        name, _, at = sample.partition("@")
        if at:
            token = int(at) if at.isdecimal() else -1
        step = name.partition("/")[0]
        samples = self.samples(int(step)) if step.isdecimal() else []
        number = next((i for i, one in enumerate(samples) if one.key == name), None)
        if number is None:
            raise ValueError(f"{self._run} has no sample {name!r}; want step/prompt/sample, as in its report")
        differs = _first_difference(samples[number])
        length = len(samples[number].token_ids)
        token = token if token is not None else (length - 1 if differs is None else differs)
        if not 0 <= token < length:
            raise ValueError(f"sample {name} has response tokens 0 to {length - 1}, got {token}")
        return Target(step=int(step), number=number, token=token)

    def _first_mismatch(self, token: int | None) -> Target:
        steps = sorted({event.step for event in self.events if isinstance(event, Sampled)})
        for step in steps:
            if not (self._run / sidecar_name(step)).is_file():
                continue
            for sample in self.samples(step):
                if _first_difference(sample) is not None:
                    return self.target(sample.key, token)
        if not steps:
            raise ValueError(f"{self._run}: no step was recorded")
        return self.target(self.samples(steps[0])[0].key, token)

    def locate(self, target: Target, folder: Path, say: Callable[[str], None]) -> Answered:
        """Computes the target's step again on both sides and compares them. RunFailed when that is not possible."""
        samples, own = self.samples(target.step), self._own_traces(target.step)
        question = Question(
            sequences=[self._sequence(sample) for sample in samples],
            number=target.number,
            last=len(samples[target.number].prompt_ids) + target.token - 1,
            recorded=(samples[target.number].rollout_bits, samples[target.number].trainer_bits),
        )
        setting = self.setting
        if target.step == 1:  # no training step is repeated, so no KL term is needed
            setting = Setting(
                config=self.config.model_copy(update={"kl_coef": 0.0}),
                inputs=setting.inputs,
                contract=setting.contract,
            )
        engine = self._engine(samples[target.number].key)
        say(f"starting both sides for sample {samples[target.number].key}, token {target.token}")
        with (
            scratch_folder() as scratch,
            hosted(self._parts, setting, setting, engine, folder, scratch) as (ranks, engines),
        ):
            self._to_step(target.step, ranks, engines, scratch, say)
            say("tracing")
            timeout = self.config.step_timeout
            decoder = Decoder.read(setting.inputs.model, self.config.segments)
            session = Session(TrainerHosts(ranks, timeout), RolloutHosts(engines, timeout), decoder, scratch)
            answered = session.locate(question)
        if own is not None:
            answered = self._with_own_traces(answered, own, target.step, decoder)
        return replace(answered, located=noted(answered.located, self.config))

    def _own_traces(self, step: int) -> tuple[SideTrace, SideTrace] | None:
        """What the run recorded about this step while it computed it, if it did: trainer and rollout side."""
        file = self._run / trace_name(step)
        if not file.is_file():
            return None
        sides = read_traces(file)
        if sides.keys() != {"trainer", "rollout"}:
            raise ValueError(f"{file}: traces of {', '.join(sides) or 'no side'}, want trainer and rollout")
        return sides["trainer"], sides["rollout"]

    def _with_own_traces(
        self, answered: Answered, own: tuple[SideTrace, SideTrace], step: int, decoder: Decoder
    ) -> Answered:
        found = first_divergence(*own, decoder.sites())
        seen = coverage(*own, decoder.sites())
        located = answered.located
        if found is None:
            text = f"the {seen.tokens} tokens that the run traced in step {step} agreed at {seen.points} points"
            return replace(answered, located=replace(located, in_the_run=text))
        key = self.samples(step)[found.token.sequence].key
        text = (
            f"the run's own trace of step {step} first differs at {found.site}, token {found.token.index} of sample "
            f"{key} ({found.tokens} of {found.compared} tokens)"
        )
        if located.verdict is not Verdict.DIFFERENT:
            located = replace(located, verdict=Verdict.DIFFERENT, summary=f"{text}; computed again, {located.summary}")
        return replace(answered, located=replace(located, in_the_run=text))

    def _engine(self, key: str) -> int:
        for event in self.events:
            if isinstance(event, Sampled) and event.key == key:
                return event.engine
        raise ValueError(f"{self._run / TIMELINE} does not say which engine drew sample {key}")

    def _sequence(self, sample: StepSample) -> TracedSequence:
        return TracedSequence(
            name=sample.key,
            token_ids=(*sample.prompt_ids, *sample.token_ids),
            prompt_length=len(sample.prompt_ids),
            temperature=self.config.temperature,
        )

    def _to_step(self, step: int, ranks: Group, engines: Group, scratch: Path, say: Callable[[str], None]) -> None:
        """The weights under which a step was computed: earlier steps are trained again from their records."""
        timeout = self.config.step_timeout
        trainer = TrainerGroup(ranks, timeout)
        for earlier in range(1, step):
            say(f"training step {earlier} of {step - 1} again")
            trainer.train_step(earlier, [self._train_sample(sample) for sample in self.samples(earlier)])
        path = scratch / "weights"
        path.mkdir()
        version = version_of(step - 1, trainer.export(str(path)))
        recorded = {event.version: event.digest for event in self.events if isinstance(event, Published)}
        if recorded.get(step - 1) != version.digest:
            raise RunFailed(
                f"the weights of step {step} did not come out again: version {step - 1} was "
                f"{str(recorded.get(step - 1))[:12]}, now it is {version.digest[:12]}; native training may not repeat "
                "its bits, so try an earlier step"
            )
        if step > 1:
            engines.everyone("publish", str(path), version, timeout=timeout)

    def _train_sample(self, sample: StepSample) -> TrainSample:
        strict = "R" in self.config.routes("rollout").values()
        return TrainSample(
            key=SampleKey(*(int(part) for part in sample.key.split("/"))),
            token_ids=(*sample.prompt_ids, *sample.token_ids),
            prompt_length=len(sample.prompt_ids),
            advantage=sample.advantage,
            rollout_logp_bits=tuple(sample.rollout_bits),
            rollout_contract=self.setting.contract.digest() if strict else "",
            support=sample.support,
        )


def as_it_was_read(config: RunConfig, inputs: Mapping[str, Any]) -> RunConfig:
    """The settings with the absolute paths of the recorded inputs; a preset stays one, wherever samebits lies."""
    names = {"model": "model", "reference_checkpoint": "reference", "prompt_data": "prompts", "eval_data": "held_out"}
    given = {key: getattr(config, key) or "preset:" for key in names}
    paths = {key: inputs[names[key]]["path"] for key, value in given.items() if not value.startswith("preset:")}
    return config.model_copy(update=paths)


def noted(located: Located, config: RunConfig) -> Located:
    """With a note where the settings of a run limited its draws, which is not done again."""
    return replace(located, hints=(*located.hints, _ALL_IDS)) if config.limited else located


def _first_difference(sample: StepSample) -> int | None:
    pairs = zip(sample.rollout_bits, sample.trainer_bits, strict=True)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), None)
