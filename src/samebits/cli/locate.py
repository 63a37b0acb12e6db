"""`samebits locate`: which boundary of which layer differs first for a token, from a run or between two models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from samebits.cli.run import INTERRUPTED, prepare, reason_of
from samebits.contract.routes import MODULES
from samebits.evidence.store import LOCATE, LOCATED
from samebits.evidence.verdict import Verdict
from samebits.rl.config import RunConfig, load_config
from samebits.rl.inputs import Inputs, read_object, resolve_model
from samebits.rl.protocols import RunFailed

if TYPE_CHECKING:
    from samebits.locate.hosting import Setting
    from samebits.locate.session import Answered
    from samebits.rl.job import Parts

PROMPT = "What is 7 + 5?"


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """Two models given by hand: directories or presets, routes, layouts, and the tokens to compare on."""

    trainer_model: str
    rollout_model: str
    trainer_case: str
    rollout_case: str
    trainer_tp: int
    trainer_cp: int
    rollout_tp: int
    max_tp: int | None
    native_compile: bool
    temperature: float
    prompt: str | None
    prompt_ids: str | None
    response_ids: str | None
    max_tokens: int
    seed: int


def locate_command(
    run: Path | None,
    by_hand: ByHand | None,
    sample: str | None,
    token: int | None,
    provider: str | None,
    out: Path | None,
    as_json: bool,
    debug: bool,
) -> int:
    """Locates, prints, writes the repro, and returns the exit code."""
    from samebits.cli.wiring import parts
    from samebits.report import write_report

    if (run is None) == (by_hand is None):
        typer.echo("error: give a run directory, or --trainer-model and --rollout-model", err=True)
        return Verdict.CANNOT_TELL.exit_code
    folder = out or (run / LOCATE if run is not None else Path(LOCATE))
    prepare()
    try:
        if run is not None:
            answered = _from_run(run, sample, token, provider, parts(), folder)
        else:
            assert by_hand is not None
            answered = _between(by_hand, parts(), folder)
        found = _written(answered, folder)
        if run is not None and folder == run / LOCATE:
            write_report(run)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except (ValueError, RunFailed, OSError) as error:
        if debug:
            raise
        if as_json:
            typer.echo(json.dumps({"verdict": Verdict.CANNOT_TELL.value, "summary": reason_of(error)}))
        else:
            typer.echo(f"error: {reason_of(error)}", err=True)
        return Verdict.CANNOT_TELL.exit_code
    if as_json:
        typer.echo(json.dumps(found.as_data()))
    else:
        from samebits.cli.located import show

        show(found)
    return found.verdict.exit_code


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _written(answered: Answered, folder: Path) -> Any:
    """Puts what was found into `folder`; the result, with the path of the repro in it."""
    import dataclasses

    from samebits.locate.repro import write_repro

    found = answered.located
    if answered.sample is not None:
        path = write_repro(folder, found, answered.sample)
        found = dataclasses.replace(found, repro=str(path))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOCATED).write_text(json.dumps(found.as_data(), indent=1) + "\n", encoding="utf-8")
    return found


def _from_run(
    run: Path, sample: str | None, token: int | None, provider: str | None, parts: Parts, folder: Path
) -> Answered:
    from samebits.locate.recorded_run import RecordedRun

    recorded = RecordedRun(run, parts, provider)
    return recorded.locate(recorded.target(sample, token), folder, _say)


def _between(given: ByHand, parts: Parts, folder: Path) -> Answered:
    from samebits.locate.two_models import Given, locate_between

    models = [resolve_model(name, name) for name in (given.trainer_model, given.rollout_model)]
    prompt = _prompt(given, models[1])
    response = _ids(given.response_ids, "--response-ids")
    _check_ids((*prompt, *response), models)
    length = len(response) or given.max_tokens
    settings = [_setting(given, parts, model, len(prompt), length) for model in models]
    asked = Given(prompt=prompt, response=response, max_tokens=given.max_tokens, seed=given.seed)
    return locate_between(parts, settings[0], settings[1], asked, folder, _say)


def _prompt(given: ByHand, model: Path) -> tuple[int, ...]:
    if given.prompt_ids is not None:
        return _ids(given.prompt_ids, "--prompt-ids")
    from samebits.rl.chat import ChatTokenizer

    return ChatTokenizer(model).encode([{"role": "user", "content": given.prompt or PROMPT}])


def _ids(text: str | None, flag: str) -> tuple[int, ...]:
    words = (text or "").replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{flag}: want token ids, such as 5,17,3; got {text!r}")
    return tuple(map(int, words))


def _check_ids(ids: Sequence[int], models: Sequence[Path]) -> None:
    for model in models:
        size = read_object(model / "config.json").get("vocab_size")
        if isinstance(size, int) and ids and max(ids) >= size:
            raise ValueError(f"token id {max(ids)} is beyond the vocabulary of {model}, which has {size}")


def _setting(given: ByHand, parts: Parts, model: Path, prompt: int, response: int) -> Setting:
    from samebits.locate.hosting import Setting

    inputs = Inputs(model=model, reference=model, prompts=model, held_out=None)
    config = _config(given, model, prompt, response)
    return Setting(config=config, inputs=inputs, contract=parts.contract(config, inputs))


def _config(given: ByHand, model: Path, prompt: int, response: int) -> RunConfig:
    trainer, rollout = _routes(given.trainer_case), _routes(given.rollout_case)
    flags: Mapping[str, Any] = {
        "model": str(model),
        **{f"{module}_case": f"{trainer[module]}/{rollout[module]}" for module in MODULES},
        "train_tp": given.trainer_tp,
        "train_cp": given.trainer_cp,
        "rollout_tp": given.rollout_tp,
        "max_tp": given.max_tp,
        "native_compile": given.native_compile,
        "temperature": given.temperature,
        "max_prompt_length": prompt,
        "max_response_length": response,
        "kl_coef": 0.0,
    }
    return load_config({name: value for name, value in flags.items() if value is not None})


def _routes(case: str) -> dict[str, str]:
    """R, P, or a route per module: attention=R,ffn=P,logp=R (what is left out is R)."""
    if case in ("R", "P"):
        return dict.fromkeys(MODULES, case)
    routes: dict[str, str] = {}
    for part in case.split(","):
        module, _, route = part.partition("=")
        if module not in MODULES or route not in ("R", "P") or module in routes:
            raise ValueError(f"case {case!r}: want R, P, or module=route, each once, with modules {', '.join(MODULES)}")
        routes[module] = route
    return dict.fromkeys(MODULES, "R") | routes
