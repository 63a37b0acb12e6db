"""One rollout engine: vLLM's engine core in this process, its workers here (TP1) or in processes of their own.

Nothing of vLLM or torch is imported before the environment that configures them is set.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from samebits import env
from samebits.into_vllm.config import EngineConfig
from samebits.into_vllm.plan import RoutePlan
from samebits.into_vllm.settings import SOCKET_FOLDER, engine_arguments, environment, torch_threads
from samebits.scratch import scratch_folder
from samebits.timeline.types import (
    GenerateRequest,
    Rollout,
    SampleKey,
    ShardDigest,
    Support,
    WeightVersion,
    limits_problem,
)
from samebits.trace import Entry, TracedSequence

_LOWEST_TEMPERATURE = 0.01


class EngineRefused(RuntimeError):
    """The engine did not start: what was refused, and by whom."""


class EngineDied(RuntimeError):
    """A worker or the engine itself is gone: which, and what it was doing."""


class RolloutEngine:
    """Generates responses under keyed draws, reports their log-probability bits, takes new weights in place."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the engine and asks every worker for its proof.

        Raises EngineRefused for a model or setting that is not covered, ProofMissing when a worker can't prove
        its routes.
        """
        self.config = config
        cpus = sorted(os.sched_getaffinity(0))
        threads = config.threads or max(1, len(cpus) // config.tp)
        self._plan = RoutePlan.for_engine(config, threads)
        # vLLM's workers leave their sockets behind
        self._scratch = ExitStack()
        with ExitStack() as on_failure:
            on_failure.callback(self._scratch.close)
            sockets = self._scratch.enter_context(scratch_folder(longest=SOCKET_FOLDER))
            env.export(environment(config, self._plan, cpus, threads, str(sockets)))
            self._engine = self._start(torch_threads(config, threads))
            on_failure.callback(self._engine.engine_core.shutdown)
            self._pids = dict(self._ask("samebits_process", during="start"))
            if config.forced:
                self._ask("samebits_force", during="start")
            self.proof()
            on_failure.pop_all()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Rollout]:
        """One response per request, in the order of the requests, all under one weight version.

        Raises ValueError for a request that the engine can't serve, EngineDied when a worker is gone,
        RuntimeError when the workers' weight versions differ or change meanwhile.
        """
        version = self.version()
        for request in requests:
            self._check(request)
        outputs = self._produce(dict(enumerate(requests)), "generate")
        if self.version() != version:
            raise RuntimeError(f"the weights changed from {version} to {self.version()} while tokens were produced")
        supports = self._supports(requests)
        return [
            self._rollout(request, outputs[number], version, supports.get(number))
            for number, request in enumerate(requests)
        ]

    def publish(self, path: str, version: WeightVersion) -> list[ShardDigest]:
        """Loads the safetensors files in `path` into every worker, in place, as `version`.

        Returns the digest of every parameter slice that a worker now holds, over all workers. The prefix cache
        is reset: it holds keys and values of the old weights.
        """
        answers = self._ask("samebits_publish", path, version.counter, version.digest, during="publish")
        with self._dying("publish"):
            if not self._engine.reset_prefix_cache():
                raise RuntimeError("publish: the prefix cache could not be reset; requests are still running")
        if self.version() != version:
            raise RuntimeError(f"publish: the workers hold {self.version()}, want {version}")
        return [ShardDigest(**shard) for shards in answers for shard in shards]

    def version(self) -> WeightVersion:
        """The weight version that every worker holds. Raises RuntimeError when they differ or one has none."""
        answers = self._ask("samebits_version", during="version")
        if None in answers or len({tuple(answer) for answer in answers}) != 1:
            raise RuntimeError(f"the workers do not hold one weight version: {answers}; publish again")
        return WeightVersion(*answers[0])

    def shards(self) -> list[ShardDigest]:
        """The digest of every parameter slice that a worker holds, over all workers."""
        answers = self._ask("samebits_shards", during="shards")
        return [ShardDigest(**shard) for shards in answers for shard in shards]

    def trace(
        self, sequences: Sequence[TracedSequence], traced: Mapping[int, int], keep: Collection[tuple[int, str]] = ()
    ) -> list[tuple[list[Entry], dict[str, Any]]]:
        """Produces given sequences token by token on a `forced` engine, and records points while it does.

        `traced` maps the number of a sequence to its last index of interest, `keep` are points whose rows are wanted
        whole. Returns, per worker, what it recorded and the facts of its sites. The prefix cache is emptied first;
        traced sequences go first, so that their prompts are computed and not found.
        """
        with self._dying("trace"):
            self._engine.reset_prefix_cache()
        self._ask("samebits_trace", dict(traced), [tuple(point) for point in keep], during="trace")
        order = sorted(range(len(sequences)), key=lambda number: (number not in traced, number))
        try:
            self._produce({number: _as_request(number, sequences[number]) for number in order}, "trace")
        finally:
            answers = self._ask("samebits_traced", during="trace")
        return answers

    def watch(self, traced: Mapping[int, int]) -> None:
        """Record points of the next requests, by their numbers, up to the index given for each."""
        self._ask("samebits_trace", dict(traced), [], during="watch")

    def watched(self) -> list[list[Entry]]:
        """Stop recording; what each worker recorded."""
        return [entries for entries, _ in self._ask("samebits_traced", during="watched")]

    def live_shards(self) -> list[ShardDigest]:
        """The digest of every parameter slice that a worker holds now, computed anew, over all workers."""
        answers = self._ask("samebits_live_shards", during="live_shards")
        return [ShardDigest(**shard) for shards in answers for shard in shards]

    def weight(self, name: str) -> list[tuple[int, int, Any]]:
        """(dim, first row, bf16 bits as int16) of each slice of one Hugging Face parameter, over all workers."""
        return [part for parts in self._ask("samebits_weight", name, during="weight") for part in parts]

    def proof(self) -> list[dict[str, Any]]:
        """The route record of every worker, checked against the plan. Raises ProofMissing."""
        from samebits.into_vllm.proof import check_proofs

        records = self._ask("samebits_proof", during="proof")
        check_proofs(records, self._plan, self.config.tp)
        return records

    def close(self) -> None:
        """Ends the workers."""
        self._engine.engine_core.shutdown()
        self._scratch.close()

    def _start(self, threads: int) -> Any:
        import torch
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if self.config.tp == 1 and self.config.device == "cpu":
            torch.set_num_threads(threads)
        try:
            return LLMEngine.from_engine_args(EngineArgs(**engine_arguments(self.config, self._plan)))
        except Exception as error:
            raise EngineRefused(f"engine {self.config.engine} did not start: {_root(error)}") from error

    def _check(self, request: GenerateRequest) -> None:
        """Raise ValueError for a request that the engine can't serve."""
        if 0 < request.temperature < _LOWEST_TEMPERATURE:
            raise ValueError(
                f"{request.key}: temperature {request.temperature} would be raised to {_LOWEST_TEMPERATURE} by vLLM; "
                "use 0 for greedy or at least that"
            )
        room = self.config.max_model_len - len(request.prompt_ids)
        if not 0 < request.max_tokens <= room:
            raise ValueError(
                f"{request.key}: max_tokens {request.max_tokens} after a prompt of {len(request.prompt_ids)} tokens "
                f"does not fit max_model_len {self.config.max_model_len}"
            )
        problem = limits_problem(request.top_k, request.top_p, request.min_p)
        if problem:
            raise ValueError(f"{request.key}: {problem}")
        if request.limited and self.config.case.logp == "P":
            raise ValueError(
                f"{request.key}: vLLM's own sampler does not say which tokens top-k, top-p or min-p kept; "
                "set the case of logp to R, or limit nothing"
            )
        if request.forced and not self.config.forced:
            raise ValueError(f"{request.key}: recorded tokens to produce, but this engine draws; set forced")
        vocabulary = self._engine.model_config.get_vocab_size()
        ids = (*request.prompt_ids, *request.forced)
        if min(ids, default=0) < 0 or max(ids, default=0) >= vocabulary:
            raise ValueError(f"{request.key}: token ids must be in [0, {vocabulary})")

    def _produce(self, requests: Mapping[int, GenerateRequest], doing: str) -> dict[int, Any]:
        """What vLLM gives for each request, by number. Where one fails, none of them stays in the engine."""
        outputs = {}
        with self._dying(doing):
            try:
                for number, request in requests.items():
                    prompt = {"prompt_token_ids": list(request.prompt_ids)}
                    self._engine.add_request(str(number), prompt, self._params(number, request))
                while self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        if output.finished:
                            outputs[int(output.request_id)] = output.outputs[0]
            except BaseException:
                # What stayed would be taken for the answer to a later request of the same number.
                self._engine.abort_request([str(number) for number in requests])
                raise
        return outputs

    def _params(self, number: int, request: GenerateRequest) -> Any:
        """vLLM's SamplingParams of one request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra: dict[str, Any] = {}
        if self.config.case.logp == "R":
            extra |= {"samebits_seed": _signed(request.seed), "samebits_request": number}
        if request.forced:
            extra["samebits_forced"] = list(request.forced)
        return SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            max_tokens=request.max_tokens,
            logprobs=0,
            flat_logprobs=True,
            stop_token_ids=list(request.stop_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=extra or None,
        )

    def _supports(self, requests: Sequence[GenerateRequest]) -> dict[int, dict[int, bytes]]:
        """Request -> position -> kept ids, from all workers, which must agree."""
        if not any(request.limited for request in requests):
            return {}
        first, *others = self._ask("samebits_supports", during="generate")
        if any(other != first for other in others):
            raise RuntimeError("the workers kept different tokens under top-k, top-p or min-p")
        return dict(first)

    def _rollout(
        self, request: GenerateRequest, output: Any, version: WeightVersion, kept: dict[int, bytes] | None
    ) -> Rollout:
        import numpy as np

        # Python floats made from fp32 values convert back without loss.
        bits = np.asarray(output.logprobs.logprobs, dtype=np.float32).view(np.uint32).tolist()
        tokens = tuple(output.token_ids)
        if min(tokens, default=0) < 0:
            raise RuntimeError(
                f"{request.key}: token {[token < 0 for token in tokens].index(True)} has no distribution to be drawn "
                "from: its logits hold NaN or +inf, or nothing finite"
            )
        if len(bits) != len(tokens):
            raise RuntimeError(f"{request.key}: {len(tokens)} tokens came with {len(bits)} log-probabilities")
        return Rollout(
            key=request.key,
            prompt_ids=request.prompt_ids,
            token_ids=tokens,
            logp_bits=tuple(bits),
            version=version,
            contract=self._plan.contract_digest,
            finish_reason=str(output.finish_reason),
            engine=self.config.engine,
            support=_support(request, tokens, kept) if request.limited else None,
        )

    def _ask(self, method: str, *args: Any, during: str) -> list[Any]:
        with self._dying(during):
            return list(self._engine.collective_rpc(method, args=args))

    @contextmanager
    def _dying(self, doing: str) -> Iterator[None]:
        """Turn whatever vLLM raises after a worker's death into EngineDied that names the worker."""
        try:
            yield
        except Exception as error:
            dead = self._dead_workers()
            if not dead:
                raise
            raise EngineDied(f"engine {self.config.engine}: {', '.join(dead)} died during {doing}") from error

    def _dead_workers(self) -> list[str]:
        workers = getattr(self._engine.model_executor, "workers", None) or []
        return [
            f"worker {rank} (pid {worker.proc.pid}, exit code {worker.proc.exitcode})"
            for rank, worker in enumerate(workers)
            if not worker.proc.is_alive()
        ]


def _support(request: GenerateRequest, tokens: Sequence[int], kept: dict[int, bytes] | None) -> Support:
    """The kept ids of a response's tokens. Raises RuntimeError where one is missing or not in its own."""
    # scheduling ahead draws one token more before it is known that the last one ended the response
    found = {position: ids for position, ids in (kept or {}).items() if position < len(tokens)}
    if sorted(found) != list(range(len(tokens))):
        raise RuntimeError(f"{request.key}: supports of {len(found)} tokens for {len(tokens)} tokens")
    support = Support.of([array("i", found[position]) for position in range(len(tokens))])
    problem = support.problem(tokens)
    if problem:
        raise RuntimeError(f"{request.key}: {problem}")
    return support


def _as_request(number: int, sequence: TracedSequence) -> GenerateRequest:
    """Asks for as many tokens as the sequence has behind its prompt."""
    return GenerateRequest(
        key=SampleKey(0, number, 0),
        prompt_ids=sequence.token_ids[: sequence.prompt_length],
        seed=0,
        max_tokens=len(sequence.token_ids) - sequence.prompt_length,
        temperature=sequence.temperature,
        stop_ids=(),
        forced=sequence.token_ids[sequence.prompt_length :],
    )


def _signed(seed: int) -> int:
    """A 64-bit seed as the signed integer of the same bits."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be an unsigned 64-bit integer, got {seed}")
    return seed - (1 << 64) if seed >> 63 else seed


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
