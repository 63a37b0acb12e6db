"""What a manifest declares, held against the timeline and the route records. Standard library only.

A setting that a manifest does not name (it was written before there was one) has the default of then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf, isclose, prod
from typing import Any

from samebits.contract import digest_of
from samebits.contract.routes import CASES, MODULES
from samebits.evidence.routes import is_strict, process_name
from samebits.timeline.events import Evaluated, Event, Published, RunStarted, Sampled, Trained

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
    _check_inputs(config, manifest.get("inputs"))
    _check_contract(config, content)
    _check_samples(config, events)
    _check_losses(config, events)
    _check_evaluations(config, events)
    _check_saved(config, manifest.get("saved"), events)
    reward = manifest.get("reward")
    if config.get("reward") != (reward.get("path") if isinstance(reward, Mapping) else reward):
        raise ValueError(f"manifest.json: config.reward is {config.get('reward')!r}, {reward!r:.80} was used")


def vocabulary(manifest: Mapping[str, Any]) -> int | None:
    """The vocabulary's size that a checked manifest's contract names; None where it names none."""
    model = manifest["contract"]["content"].get("model")
    size = model.get("vocab_size") if isinstance(model, Mapping) else None
    return int(size) if isinstance(size, str) and size.isdecimal() else None


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


def _check_inputs(config: Mapping[str, Any], inputs: object) -> None:
    """The files that were read are those that the settings ask for: a reference model, held-out problems."""
    if not isinstance(inputs, Mapping) or not inputs:
        return
    if not config.get("reference_checkpoint") and inputs.get("reference") != inputs.get("model"):
        raise ValueError("manifest.json: config names no reference model, and another than the model was read")
    if bool(config.get("eval_data")) != bool(inputs.get("held_out")):
        raise ValueError(f"manifest.json: config.eval_data is {config.get('eval_data')!r}, other inputs were read")


def _check_saved(config: Mapping[str, Any], saved: object, events: Iterable[Event]) -> None:
    """The model that was kept has the weights that were published last."""
    if bool(config.get("save_model")) != (saved is not None):
        raise ValueError(f"manifest.json: config.save_model is {config.get('save_model')!r}, saved is {saved!r:.80}")
    if saved is None:
        return
    files = saved.get("files") if isinstance(saved, Mapping) else None
    if not isinstance(saved, Mapping) or not isinstance(files, Mapping) or not files:
        raise ValueError(f"manifest.json: saved names no files: {saved!r:.80}")
    last = [event for event in events if isinstance(event, Published)][-1]
    if (saved.get("version"), saved.get("digest")) != (last.version, last.digest):
        raise ValueError(f"manifest.json: the saved model is not version {last.version}, which was published last")


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
    for sample in samples if limit is not None and not config.get("replay_tokens") else ():
        if sample.finish_reason == "length" and sample.response_length != limit:
            raise ValueError(
                f"manifest.json: config.{longest} is {limit}, {sample.key} is said to end there and does not"
            )
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


def _check_losses(config: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Every loss is that of the policy plus the KL term's by the settings' coefficient."""
    coefficient = config.get("kl_coef")
    if not isinstance(coefficient, int | float):
        return
    for event in events:
        if isinstance(event, Trained) and not isclose(
            event.loss, event.policy_loss + coefficient * event.kl, rel_tol=1e-9, abs_tol=1e-12
        ):
            raise ValueError(
                f"manifest.json: config.kl_coef is {coefficient}, the loss of step {event.step} has another"
            )


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
    longest = config.get("max_response_length", inf)
    if any(not 1 <= event.mean_response_length <= longest for event in found):
        raise ValueError(
            f"manifest.json: config.max_response_length is {longest}, evaluated responses had another length"
        )


def check_processes(
    manifest: Mapping[str, Any], records: Iterable[Mapping[str, Any]], events: tuple[Event, ...]
) -> None:
    """Raises ValueError where a checked route record shows another mode, layout, device or provider than the manifest,
    or other weights at the end than were published last."""
    config, packages = manifest["config"], manifest.get("packages")
    last = [event for event in events if isinstance(event, Published)][-1]
    checks = {"trainer": _trainer_problem(config), "rollout": _rollout_problem(config, [last.version, last.digest])}
    kernels: dict[Any, str] = {}
    for record in records:
        name, device = process_name(record), str(record.get("device", "cpu")).partition(":")[0]
        problem = checks[record["role"]](record) or _installation_problem(record, packages)
        if is_strict(record):
            kernels.setdefault(record.get("kernels"), name)
        if len(kernels) > 1:
            problem = f"computed with other kernels than {next(iter(kernels.values()))}"
        if device != config.get("device", "cpu"):
            problem = f"ran on {device}, config.device is {config.get('device')!r}"
        if problem:
            raise ValueError(f"route record of {name}: {problem}")


def _installation_problem(record: Mapping[str, Any], packages: object) -> str:
    """The process ran the packages of the manifest, with every patch of its own in place."""
    versions, patches = record.get("versions"), record.get("patches")
    if isinstance(versions, Mapping) and isinstance(packages, Mapping):
        for name in sorted(versions.keys() & packages.keys()):
            if versions[name] != packages[name]:
                return f"ran {name} {versions[name]}, the manifest says {packages[name]}"
    for patch in patches if isinstance(patches, list) else ():
        if not isinstance(patch, Mapping) or patch.get("in_place") is not True:
            return "a patch that it lists was not in place"
    return ""


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
        return _scoring_problem(record, str(case).startswith("R"))

    return problem


def _scoring_problem(record: Mapping[str, Any], strict: bool) -> str:
    """Whose log-probabilities a trainer rank returned: its provider's where the case says R, native ones elsewhere."""
    shown = record.get("linear_logp")
    calls = shown.get("calls") if isinstance(shown, Mapping) else None
    scored = any(module.get("boundary") == "logprob" and module.get("calls") for module in record["modules"].values())
    if not isinstance(calls, Mapping) or not scored:
        return ""
    provider, native = calls.get("provider"), calls.get("native")
    if strict and (native or not provider):
        return f"scored {native} times by native code and {provider} times by its provider, declared is the provider"
    if not strict and provider:
        return f"its provider scored {provider} times, declared is native code"
    return ""
