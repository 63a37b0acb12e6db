"""Form "score": every layout once, all on the same tokens; the pairs are compared afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from samebits.contract import digest_of
from samebits.evidence.verdict import judge
from samebits.matrix.layouts import Shared, TrainerPool, requests_of, score_rollouts
from samebits.matrix.plan import SIDES, Matrix
from samebits.matrix.record import read_finished, write_finished
from samebits.matrix.scores import Scores, compare_layouts, samples_of
from samebits.rl.config import RunConfig
from samebits.rl.inputs import Inputs
from samebits.rl.job import Parts
from samebits.rl.protocols import RunFailed
from samebits.timeline.types import GenerateRequest, Rollout, SampleKey, TrainSample, WeightVersion

Say = Callable[[str], None]
Pairs = list[dict[str, Any]]
Layouts = dict[str, dict[str, Any]]


def score_pairs(
    matrix: Matrix, folder: Path, parts: Parts, inputs: Inputs, key: str, say: Say
) -> tuple[Pairs, Layouts]:
    """The record of every pair, and of every layout."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    config = matrix.config(None, None)
    shared = Shared(parts=parts, inputs=inputs, contract=parts.contract(config, inputs), logs=logs)
    scored = Scored(matrix, folder, shared, key, say)
    scored.rollouts()
    scored.trainers()
    return [scored.pair(*pair) for pair in matrix.pairs], scored.layouts()


class Scored:
    """What is known of the layouts of one matrix so far."""

    def __init__(self, matrix: Matrix, folder: Path, shared: Shared, key: str, say: Say) -> None:
        self._matrix, self._folder, self._shared, self._key, self._say = matrix, folder, shared, key, say
        self._scores: dict[tuple[str, str], Scores] = {}
        self._problems: dict[tuple[str, str], str] = {}
        self._tokens: dict[str, Any] = {}
        self._samples: list[TrainSample] = []
        self._pool: TrainerPool | None = None

    def rollouts(self) -> None:
        """Every rollout layout. The first one's tokens are everybody's, so its failure is raised: RunFailed."""
        first = next(iter(self._matrix.layouts["rollout"]))
        requests = requests_of(self._matrix.config(None, first), self._shared.inputs)
        recorded = self._folder / "tokens.json"
        found = read_finished(recorded, self._layout_key("rollout", first))
        if found is None:
            scores, rollouts = score_rollouts(self._shared, first, self._matrix.config(None, first), requests)
            found = {"scores": scores.as_data(), "rollouts": [_as_data(one) for one in rollouts]}
            write_finished(recorded, self._layout_key("rollout", first), found)
            self._told("rollout", first, scores)
        rollouts = [_rollout(one) for one in found["rollouts"]]
        self._scores["rollout", first] = Scores.from_data(found["scores"])
        self._tokens = {str(one.key): list(one.token_ids) for one in rollouts}
        self._samples = samples_of(rollouts)
        for name in self._matrix.layouts["rollout"]:
            if name != first:
                config = self._matrix.config(None, name)
                self._attempt("rollout", name, partial(self._generate, name, config, requests))

    def _generate(self, name: str, config: RunConfig, requests: Sequence[GenerateRequest]) -> Scores:
        return score_rollouts(self._shared, name, config, requests)[0]

    def trainers(self) -> None:
        """Every trainer layout; those of the same number of ranks share their processes."""
        configs = {name: self._matrix.config(name, None) for name in self._matrix.layouts["trainer"]}
        by_ranks = sorted(configs, key=lambda name: configs[name].trainer_ranks)
        try:
            for _, names in groupby(by_ranks, key=lambda name: configs[name].trainer_ranks):
                for name in names:
                    self._attempt("trainer", name, partial(self._score, configs[name]))
                self._close_pool()
        finally:
            self._close_pool()

    def _score(self, config: RunConfig) -> Scores:
        if self._pool is None:
            self._pool = TrainerPool(self._shared, config.trainer_ranks)
        try:
            return self._pool.score(config, self._samples, self._tokens, self._matrix.steps)
        except BaseException:
            # Its processes may be in any state: the next layout gets new ones.
            self._close_pool()
            raise

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _attempt(self, side: str, name: str, score: Callable[[], Scores]) -> None:
        """Takes over what was finished before, or scores now; a failure is the layout's own."""
        path, key = self._folder / "layouts" / f"{side}-{name}.json", self._layout_key(side, name)
        found = read_finished(path, key)
        if found is not None:
            self._scores[side, name] = Scores.from_data(found)
            self._say(f"{side} {name}: taken over from an earlier call")
            return
        try:
            scores = score()
        except (RunFailed, ValueError, OSError) as error:
            self._problems[side, name] = str(error)
            self._say(f"{side} {name}: failed: {error}")
            return
        write_finished(path, key, scores.as_data())
        self._scores[side, name] = scores
        self._told(side, name, scores)

    def _told(self, side: str, name: str, scores: Scores) -> None:
        self._say(f"{side} {name}: {scores.processes} processes, {scores.seconds:.1f} s, {scores.digest()[:12]}")

    def _layout_key(self, side: str, name: str) -> str:
        of_side = {"trainer": (name, None), "rollout": (None, name)}[side]
        config = self._matrix.config(*of_side).model_dump()
        return digest_of([self._key, side, config, self._matrix.steps if side == "trainer" else 0, self._tokens])

    def layouts(self) -> Layouts:
        """What each layout was and gave."""
        found: Layouts = {}
        for side in SIDES:
            for name, settings in self._matrix.layouts[side].items():
                scores = self._scores.get((side, name))
                entry: dict[str, Any] = {"settings": dict(settings)}
                if scores is None:
                    entry["problem"] = self._problems.get((side, name), "not started")
                else:
                    entry |= {"processes": scores.processes, "seconds": round(scores.seconds, 2)}
                    entry |= {"logp": scores.digest(), "steps": list(scores.steps)}
                found[f"{side} {name}"] = entry
        return found

    def pair(self, trainer: str, rollout: str) -> dict[str, Any]:
        """How the two layouts compare, with each other and with the first layout of the rollout side."""
        both = ("trainer", trainer), ("rollout", rollout)
        entry: dict[str, Any] = {"trainer": trainer, "rollout": rollout, "weights": "", "weights_as_reference": True}
        missing = [
            f"{side} {name}: {self._problems[side, name]}" for side, name in both if (side, name) in self._problems
        ]
        if missing:
            return {**entry, "verdict": "cannot tell", "problem": "; ".join(missing)}
        ours, theirs = (self._scores[one] for one in both)
        reference = self._scores["rollout", next(iter(self._matrix.layouts["rollout"]))]
        found = compare_layouts(ours, theirs)
        verdict = judge(found.compared_tokens, found.mismatch_count, found.nonfinite_count)
        return {
            **entry,
            "verdict": verdict.value,
            "compared_tokens": found.compared_tokens,
            "mismatch_count": found.mismatch_count,
            "max_abs_diff": found.max_abs_diff,
            "logp": ours.digest(),
            "logp_as_reference": ours.digest() == theirs.digest() == reference.digest(),
            **self._weights(ours),
        }

    def _weights(self, scores: Scores) -> dict[str, Any]:
        """Beside those of the first trainer layout that came to its end."""
        if not scores.steps:
            return {}
        every = (self._scores.get(("trainer", name)) for name in self._matrix.layouts["trainer"])
        first = next(found for found in every if found is not None)
        weights = str(scores.steps[-1]["weights"])
        return {"weights": weights, "weights_as_reference": weights == first.steps[-1]["weights"]}


def _as_data(rollout: Rollout) -> dict[str, Any]:
    return {
        "key": [rollout.key.step, rollout.key.prompt, rollout.key.sample],
        "prompt_ids": rollout.prompt_ids,
        "token_ids": rollout.token_ids,
        "logp_bits": rollout.logp_bits,
        "version": [rollout.version.counter, rollout.version.digest],
        "contract": rollout.contract,
        "finish_reason": rollout.finish_reason,
        "engine": rollout.engine,
    }


def _rollout(data: Mapping[str, Any]) -> Rollout:
    lists = {name: tuple(data[name]) for name in ("prompt_ids", "token_ids", "logp_bits")}
    whole = {**data, **lists, "key": SampleKey(*data["key"]), "version": WeightVersion(*data["version"])}
    return Rollout(**whole)
