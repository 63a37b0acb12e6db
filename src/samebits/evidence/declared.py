"""What a manifest declares, held against the timeline and the route records. Standard library only.

A setting that a manifest does not name (it was written before there was one) has the default of then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

from samebits.contract import digest_of
from samebits.contract.routes import CASES, MODULES
from samebits.evidence.routes import process_name
from samebits.timeline.events import Evaluated, Event, Published, RunStarted, Sampled

_LAYOUT = ("train_tp", "train_cp", "train_pp", "train_dp")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def check_declared(manifest: Mapping[str, Any], events: tuple[Event, ...]) -> None:
    """Raises ValueError where a checked timeline was not run as the manifest says."""
    started = events[0]
    assert isinstance(started, RunStarted)
    contract = manifest.get("contract")
    content = contract.get("content") if isinstance(contract, dict) else None
    if not isinstance(contract, dict) or not isinstance(content, dict) or digest_of(content) != contract.get("digest"):
        raise ValueError("manifest.json: the contract's content does not have the contract's digest")
    if contract["digest"] != started.contract:
        raise ValueError("the timeline was run under another contract than the manifest's")
    config = manifest.get("config")
    if not isinstance(config, dict):
        raise ValueError("manifest.json: config is missing")
    cases = {module: config.get(f"{module}_case") or config.get("case") for module in MODULES}
    if any(case not in CASES for case in cases.values()):
        raise ValueError(f"manifest.json: the cases are {cases}, want {', '.join(CASES)}")
    if cases != started.case:
        raise ValueError(f"the timeline ran case {started.case}, the manifest declares {cases}")
    if (manifest.get("replayed") is None) != (config.get("replay_tokens") is None):
        raise ValueError(
            "manifest.json: config.replay_tokens and the run that was replayed must both be there, or none"
        )
    _check_started(config, started)
    _check_contract(config, content)
    _check_samples(config, events)
    _check_evaluations(config, events)


def _whole(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if type(value) is not int or value < 0:
        raise ValueError(f"manifest.json: config.{name} is {value!r}, want a whole number")
    return value


def _check_started(config: Mapping[str, Any], started: RunStarted) -> None:
    for key, value in (
        ("num_rollout", started.steps),
        ("global_batch_size", started.samples_per_step),
        ("rollout_engines", started.rollout_engines),
    ):
        if config.get(key) != value:
            raise ValueError(f"manifest.json: config.{key} is {config.get(key)!r}, the timeline says {value}")
    ranks = prod(_whole(config, name, 1) for name in _LAYOUT)
    if ranks != started.trainer_ranks:
        raise ValueError(
            f"manifest.json: {', '.join(_LAYOUT)} make {ranks} trainer ranks, the timeline says {started.trainer_ranks}"
        )


def _check_contract(config: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """The contract's K segments and sampling constants are those of the settings."""
    segments = config.get("max_tp") or max(_whole(config, "train_tp", 1), _whole(config, "rollout_tp", 1))
    if content.get("segments") != segments:
        raise ValueError(
            f"manifest.json: the settings make {segments} K segments, the contract {content.get('segments')}"
        )
    model = content.get("model")
    for name in _SAMPLING:
        if isinstance(model, Mapping) and name in model and str(config.get(name)) != model[name]:
            raise ValueError(f"manifest.json: config.{name} is {config.get(name)!r}, the contract says {model[name]}")


def _check_samples(config: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Whole groups of one prompt's responses, none longer than the settings allow."""
    samples = [event for event in events if isinstance(event, Sampled)]
    for name, longest in (("prompt", "max_prompt_length"), ("response", "max_response_length")):
        limit = config.get(longest)
        for sample in samples if limit is not None else ():
            if getattr(sample, f"{name}_length") > _whole(config, longest, 0):
                raise ValueError(f"manifest.json: config.{longest} is {limit}, the {name} of {sample.key} is longer")
    size = config.get("samples_per_prompt")
    if size is None:
        return
    if _whole(config, "samples_per_prompt", 1) < 1 or _whole(config, "global_batch_size", 1) % size:
        raise ValueError(f"manifest.json: config.samples_per_prompt is {size!r}: groups would be torn")
    for start in range(0, len(samples), size):
        group = samples[start : start + size]
        wanted = [(group[0].step, group[0].prompt, at) for at in range(size)]
        if [(one.step, one.prompt, one.sample) for one in group] != wanted:
            raise ValueError(f"manifest.json: config.samples_per_prompt is {size}, but {group[0].key} begins no group")


def _check_evaluations(config: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Evaluations came when they were due, over as many problems as the settings say."""
    interval = config.get("eval_interval")
    if interval is None:
        return
    steps, every = _whole(config, "num_rollout", 1), _whole(config, "eval_interval", 0)
    due = []
    if every and config.get("eval_data"):
        due = [step for step in range(steps + 1) if step % every == 0 or step == steps]
    found = [event for event in events if isinstance(event, Evaluated)]
    if [event.step for event in found] != due:
        raise ValueError(f"manifest.json: evaluations are due after steps {due[:8]}, and others are on record")
    if any(event.samples != config.get("eval_prompts") for event in found):
        raise ValueError(f"manifest.json: config.eval_prompts is {config.get('eval_prompts')!r}, others were evaluated")


def check_processes(
    manifest: Mapping[str, Any], records: Iterable[Mapping[str, Any]], events: tuple[Event, ...]
) -> None:
    """Raises ValueError where a checked route record shows another mode, layout, device or provider than the manifest,
    or other weights at the end than were published last."""
    config = manifest["config"]
    last = [event for event in events if isinstance(event, Published)][-1]
    checks = {"trainer": _trainer_problem(config), "rollout": _rollout_problem(config, [last.version, last.digest])}
    for record in records:
        name, device = process_name(record), str(record.get("device", "cpu")).partition(":")[0]
        problem = checks[record["role"]](record)
        if device != config.get("device", "cpu"):
            problem = f"ran on {device}, config.device is {config.get('device')!r}"
        if problem:
            raise ValueError(f"route record of {name}: {problem}")


def _rollout_problem(config: Mapping[str, Any], weights: list[Any]) -> Callable[[Mapping[str, Any]], str]:
    modes = ("compiled",) if config.get("native_compile") else ("eager", "captured")

    def problem(record: Mapping[str, Any]) -> str:
        if record.get("mode") not in modes:
            return f"ran {record.get('mode')}, declared is {' or '.join(modes)}"
        if record.get("weights", weights) != weights:
            return f"holds weights {record['weights']}, published last were {weights}"
        return ""

    return problem


def _trainer_problem(config: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    case, mode = config.get("logp_case") or config.get("case"), config.get("linear_logp_provider_mode")
    used = str(case).startswith("R") or mode == "audit"
    declared = {
        "parallel": {name.removeprefix("train_"): value for name, value in config.items() if name.startswith("train_")},
        "linear_logp": {"provider": str(config.get("linear_logp_provider")).strip() if used else "", "mode": mode},
    }

    def problem(record: Mapping[str, Any]) -> str:
        for part, wanted in declared.items():
            shown = record.get(part)
            if not isinstance(shown, Mapping):
                continue
            for name in sorted(wanted.keys() & shown.keys()):
                if shown[name] != wanted[name]:
                    return f"{part}.{name} is {shown[name]!r}, declared is {wanted[name]!r}"
        return ""

    return problem
