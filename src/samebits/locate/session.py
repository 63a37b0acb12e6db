"""Locating: trace both sides on the same tokens, find the first site that differs, look at it again with its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file

from samebits.evidence.verdict import Verdict
from samebits.locate.explain import Facts, facts_of, hints_of, kind_of
from samebits.locate.model import Decoder
from samebits.locate.result import Located, Replayed, SideFacts, Where
from samebits.locate.sample import SideSample, SiteSample, kept_points, take_sample
from samebits.locate.search import Coverage, Divergence, coverage, first_divergence
from samebits.locate.weights import WeightDifference, differing_weights, in_model_order, stem, weight_difference
from samebits.timeline.types import ShardDigest
from samebits.trace import Entry, Point, SideTrace, Site, TracedSequence, assemble

Answer = tuple[list[Entry], dict[str, Any]]


class TracedSide(Protocol):
    """One side, all of its processes together."""

    def trace(
        self, sequences: Sequence[TracedSequence], traced: Mapping[int, int], keep: Collection[tuple[int, str]]
    ) -> list[Answer]:
        """Computes the sequences; per process, what it recorded about the traced ones and the facts of its sites."""


class TracedTrainer(TracedSide, Protocol):
    def export(self, path: str) -> Mapping[str, str]:
        """Writes its weights under Hugging Face names into `path`."""


class TracedRollout(TracedSide, Protocol):
    def live_shards(self) -> list[ShardDigest]:
        """The digest of every parameter slice that its workers hold."""

    def weight(self, name: str) -> list[tuple[int, int, np.ndarray[Any, Any]]]:
        """(dim, first row, bits) of each slice of one parameter."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to look at: `sequences` are computed together, number `number` is traced up to index `last`.

    `recorded` are the bits that (rollout, trainer) reported for its response tokens in a run, if there was one.
    """

    sequences: Sequence[TracedSequence]
    number: int
    last: int
    recorded: tuple[Sequence[int], Sequence[int]] | None = None

    @property
    def sequence(self) -> TracedSequence:
        return self.sequences[self.number]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The result, and the sample of the located site where one could be taken."""

    located: Located
    sample: SiteSample | None = None


class Session:
    """Two sides that can be asked more than once."""

    def __init__(self, trainer: TracedTrainer, rollout: TracedRollout, decoder: Decoder, scratch: Path) -> None:
        self._trainer, self._rollout = trainer, rollout
        self._decoder, self._scratch = decoder, scratch
        self._order = decoder.sites()
        self._logp = Point(decoder.layers, "logp")

    def locate(self, question: Question) -> Answered:
        """Traces once for digests and, where something differs, once more for the values of the located site."""
        weights = self._trainer_weights()
        wrong = in_model_order(differing_weights(weights, self._rollout.live_shards()), self._order)
        traces, facts = self._trace(question, question.last, [self._logp])
        seen = coverage(*traces, self._order)
        replayed = self._replayed(question, traces)
        for name, trace in zip(("trainer", "rollout side"), traces, strict=True):
            if trace.conflicts:
                return Answered(located=_ranks_disagree(name, trace, seen, replayed))
        found = first_divergence(*traces, self._order)
        if found is None:
            return Answered(located=self._nothing(question, wrong, weights, seen, replayed))
        return self._describe(question, found, wrong, weights, facts, seen, replayed)

    def _trace(
        self, question: Question, last: int, keep: Collection[Point]
    ) -> tuple[tuple[SideTrace, SideTrace], tuple[Facts, Facts]]:
        traced = {question.number: last}
        answers = [side.trace(question.sequences, traced, list(keep)) for side in (self._trainer, self._rollout)]
        traces = [assemble([entries for entries, _ in answer]) for answer in answers]
        facts = [{name: fact for _, held in answer for name, fact in held.items()} for answer in answers]
        return (traces[0], traces[1]), (facts[0], facts[1])

    def _trainer_weights(self) -> dict[str, torch.Tensor]:
        path = self._scratch / "traced-weights"
        self._trainer.export(str(path))
        return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}

    def _replayed(self, question: Question, traces: tuple[SideTrace, SideTrace]) -> Replayed | None:
        """How many recorded log-probabilities came out again, of those up to the last index of interest."""
        if question.recorded is None:
            return None
        first = question.sequence.prompt_length - 1
        count = min(len(question.recorded[0]), question.last + 1 - first)
        same = []
        for side, recorded in zip(traces[::-1], question.recorded, strict=True):
            rows = {token.index: int(row[0]) & 0xFFFFFFFF for token, row in side.rows.get(self._logp, {}).items()}
            same.append(sum(rows.get(first + at) == recorded[at] for at in range(count)))
        return Replayed(rollout=same[0], trainer=same[1], recorded=count)

    def _nothing(
        self,
        question: Question,
        wrong: Sequence[str],
        weights: Mapping[str, torch.Tensor],
        seen: Coverage,
        replayed: Replayed | None,
    ) -> Located:
        """No traced value differs: the weights may all the same, or the run's own record may."""
        common: dict[str, Any] = {**_seen(seen), "replayed": replayed}
        if wrong:
            site = next((site for site in self._order if stem(wrong[0]) in site.weights), None)
            return Located(
                verdict=Verdict.DIFFERENT,
                kind="weights",
                summary=f"{wrong[0]} differs, though no traced value shows it ({len(wrong)} parameters differ in all)",
                where=None if site is None else _where(site, question, 0, seen.tokens),
                weight=self._weight_difference(wrong[0], weights),
                **common,
            )
        if not seen.tokens:
            return Located(
                verdict=Verdict.CANNOT_TELL,
                summary="no point was recorded on both sides, so nothing was compared",
                **common,
            )
        recorded = question.recorded
        count = 0 if replayed is None else replayed.recorded
        if recorded is not None and list(recorded[0][:count]) != list(recorded[1][:count]):
            assert replayed is not None
            return Located(
                verdict=Verdict.CANNOT_TELL,
                summary=(
                    f"both sides agree now, but the run recorded a difference: of {count} recorded log-probabilities "
                    f"{replayed.rollout} of the rollout side and {replayed.trainer} of the trainer came out again"
                ),
                **common,
            )
        return Located(
            verdict=Verdict.SAME,
            summary=f"all {seen.points} recorded points agree in every bit, over {seen.tokens} tokens",
            **common,
        )

    def _describe(
        self,
        question: Question,
        found: Divergence,
        wrong: Sequence[str],
        weights: Mapping[str, torch.Tensor],
        facts: tuple[Facts, Facts],
        seen: Coverage,
        replayed: Replayed | None,
    ) -> Answered:
        keep = [*kept_points(found.site), Point(found.site.layer, "k_turned")]
        # a key of another position may have been read: then all positions are needed to say which
        last = question.last if found.site.boundary == "copy" else found.token.index
        traces, _ = self._trace(question, last, keep)
        held = self._held(found.site, weights, wrong)
        sample = take_sample(found.site, found.token, *traces, held, self._decoder)
        kind, cause = kind_of(found, *traces, wrong, facts, question.sequence)
        mine = [name for name in wrong if stem(name) in found.site.weights]
        others = [name for name in wrong if name not in mine]
        hints = hints_of(sample, *traces)
        if not sample.differences and kind != "dtype":
            hints.append("the difference did not come out again in a second pass: a side is not deterministic")
        if others:
            hints.append(f"{len(others)} other parameters differ too, first {others[0]}")
        weight = self._weight_difference(mine[0], weights) if mine else None
        sides = [
            _side(facts_of(side, found.site), sample, one)
            for side, one in zip(facts, (sample.trainer, sample.rollout), strict=True)
        ]
        where = _where(
            found.site, question, found.tokens, found.compared, found.token.index, [str(one) for one in found.region]
        )
        located = Located(
            verdict=Verdict.DIFFERENT,
            kind=kind,
            summary=f"{where}: {cause}",
            where=where,
            trainer=sides[0],
            rollout=sides[1],
            differences=sample.differences,
            weight=weight,
            hints=tuple(hints),
            replayed=replayed,
            **_seen(seen),
        )
        return Answered(located=located, sample=sample)

    def _weight_difference(self, name: str, weights: Mapping[str, torch.Tensor]) -> WeightDifference | None:
        """None for a parameter that one side lacks."""
        return weight_difference(name, weights[name], self._rollout.weight(name)) if name in weights else None

    def _held(
        self, site: Site, weights: Mapping[str, torch.Tensor], wrong: Sequence[str]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Both sides' parameters of a site. Those that agree by digest are the trainer's on both sides."""
        mine = {name: tensor for name, tensor in weights.items() if stem(name) in site.weights}
        theirs = {
            name: _put_together(tensor, self._rollout.weight(name)) if name in wrong else tensor
            for name, tensor in mine.items()
        }
        return mine, theirs


def _put_together(like: torch.Tensor, parts: Sequence[tuple[int, int, np.ndarray[Any, Any]]]) -> torch.Tensor:
    whole = like.clone()
    for dim, start, bits in parts:
        part = torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16)
        whole.narrow(dim, start, part.shape[dim]).copy_(part)
    return whole


def _seen(seen: Coverage) -> dict[str, Any]:
    return {
        "points_compared": seen.points,
        "tokens_compared": seen.tokens,
        "not_compared": tuple(map(str, seen.missing)),
    }


def _side(facts: Mapping[str, Any], sample: SiteSample, side: SideSample) -> SideFacts:
    return SideFacts(
        route=facts["route"],
        implementation=facts["implementation"],
        parameters=dict(facts["parameters"]),
        gives_the_contract=sample.gives_the_contract(side),
    )


def _where(
    site: Site,
    question: Question,
    differing: int,
    compared: int,
    index: int | None = None,
    region: Sequence[str] = (),
) -> Where:
    return Where(
        site=site.name,
        layer=site.layer,
        boundary=site.boundary,
        group=site.group,
        sequence=question.sequence.name,
        index=question.last if index is None else index,
        tokens_differing=differing,
        tokens_compared=compared,
        region=tuple(region),
    )


def _ranks_disagree(name: str, trace: SideTrace, seen: Coverage, replayed: Replayed | None) -> Located:
    point, token = trace.conflicts[0]
    return Located(
        verdict=Verdict.DIFFERENT,
        kind="ranks",
        summary=(
            f"ranks of the {name} that hold the same values disagree, first at {point.name} of layer {point.layer}, "
            f"token {token.index}"
        ),
        replayed=replayed,
        **_seen(seen),
    )
