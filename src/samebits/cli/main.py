"""`samebits`: the door. Each command's work lies in the file of its name."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Optional

import typer

from samebits import __version__

app = typer.Typer(
    name="samebits",
    help="The same log-probability bits in the engine that generates tokens and the one that trains on them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags off where a terminal is narrow
)
contract_app = typer.Typer(help="What is promised.", no_args_is_help=True)
app.add_typer(contract_app, name="contract")
bench_app = typer.Typer(help="What it costs.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"samebits {__version__}")
        raise typer.Exit()


@app.callback()
def door(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """What may stand before a command."""


# typer reads these annotations at run time, where `X | None` of a string annotation also works from 3.10 on.
Text = Optional[str]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045
Real = Optional[float]  # noqa: UP045
Switch = Optional[bool]  # noqa: UP045

# What `samebits run` takes besides the settings of a run.
RUN_OWN = ("context", "config", "matrix", "matrix_dir", "print_config", "debug")


@app.command(short_help="Train by RL and compare every log-probability, bit by bit.")
def run(
    context: typer.Context,
    config: Annotated[Optional[Path], typer.Option(help="TOML file; flags override it.")] = None,  # noqa: UP045
    matrix: Annotated[Optional[Path], typer.Option(help="TOML file of layouts: compare all pairs.")] = None,  # noqa: UP045
    matrix_dir: Annotated[Optional[Path], typer.Option(help="Its records; left out: runs/matrix-NAME.")] = None,  # noqa: UP045
    print_config: Annotated[Text, typer.Option(help="Print all settings and end: toml or json.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    case: Annotated[Text, typer.Option(help="trainer/rollout: R/R, P/P, R/P or P/R.")] = None,
    attention_case: Annotated[Text, typer.Option(help="Case of attention alone.")] = None,
    ffn_case: Annotated[Text, typer.Option(help="Case of the feed-forward part alone.")] = None,
    logp_case: Annotated[Text, typer.Option(help="Case of LM head and log-probability alone.")] = None,
    device: Annotated[Text, typer.Option(help="cpu or cuda, for both sides.")] = None,
    run_dir: Annotated[Text, typer.Option(help="Where the records go.")] = None,
    model: Annotated[Text, typer.Option(help="Hugging Face directory, or preset:NAME.")] = None,
    save_model: Annotated[Switch, typer.Option(help="Keep the trained model in RUN_DIR/model.")] = None,
    reference_checkpoint: Annotated[Text, typer.Option(help="Model of the KL term; left out: the start.")] = None,
    prompt_data: Annotated[Text, typer.Option(help="JSONL problems, or preset:NAME.")] = None,
    eval_data: Annotated[Text, typer.Option(help="Held-out JSONL problems; empty: none.")] = None,
    reward: Annotated[Text, typer.Option(help="Your function of a response and its label.")] = None,
    num_rollout: Annotated[Whole, typer.Option(help="Steps: a rollout and a training step.")] = None,
    samples_per_prompt: Annotated[Whole, typer.Option(help="Responses per prompt.")] = None,
    global_batch_size: Annotated[Whole, typer.Option(help="Responses per step.")] = None,
    max_prompt_length: Annotated[Whole, typer.Option(help="Tokens per prompt at most.")] = None,
    max_response_length: Annotated[Whole, typer.Option(help="Tokens per response at most.")] = None,
    max_tokens_per_gpu: Annotated[Whole, typer.Option(help="Tokens per training micro-batch.")] = None,
    kl_coef: Annotated[Real, typer.Option(help="Weight of the KL term.")] = None,
    lr: Annotated[Real, typer.Option(help="Learning rate.")] = None,
    clip_ratio: Annotated[Real, typer.Option(help="PPO clip.")] = None,
    clip_grad: Annotated[Real, typer.Option(help="Largest gradient norm.")] = None,
    temperature: Annotated[Real, typer.Option(help="Sampling temperature.")] = None,
    top_k: Annotated[Whole, typer.Option(help="Draw from so many likeliest tokens; 0: all.")] = None,
    top_p: Annotated[Real, typer.Option(help="Draw from the likeliest tokens with this mass.")] = None,
    min_p: Annotated[Real, typer.Option(help="Leave out tokens below this part of the likeliest.")] = None,
    seed: Annotated[Whole, typer.Option(help="Order of the problems.")] = None,
    rollout_seed: Annotated[Whole, typer.Option(help="Random draws of the rollout.")] = None,
    eval_interval: Annotated[Whole, typer.Option(help="Steps between evaluations; 0: none.")] = None,
    eval_prompts: Annotated[Whole, typer.Option(help="Problems per evaluation.")] = None,
    trace_tokens: Annotated[Whole, typer.Option(help="Tokens per step that `locate` can look into.")] = None,
    linear_logp_provider: Annotated[Text, typer.Option(help="Who scores: dotted path or registered name.")] = None,
    linear_logp_provider_mode: Annotated[Text, typer.Option(help="If it refuses: auto, strict or audit.")] = None,
    replay_tokens: Annotated[Text, typer.Option(help="Produce a run's recorded tokens again.")] = None,
    train_tp: Annotated[Whole, typer.Option(help="Trainer's tensor parallelism.")] = None,
    train_sequence_parallel: Annotated[Switch, typer.Option(help="Trainer's sequence parallelism.")] = None,
    train_cp: Annotated[Whole, typer.Option(help="Trainer's context parallelism.")] = None,
    train_cp_layout: Annotated[Text, typer.Option(help="zigzag or allgather.")] = None,
    train_pp: Annotated[Whole, typer.Option(help="Trainer's pipeline stages.")] = None,
    train_vpp: Annotated[Whole, typer.Option(help="Interleaved chunks per stage.")] = None,
    train_dp: Annotated[Whole, typer.Option(help="Trainer's data parallelism.")] = None,
    train_recompute: Annotated[Switch, typer.Option(help="Recompute layers for their gradients.")] = None,
    train_optimizer_offload: Annotated[Real, typer.Option(help="Part of Adam's moments in host memory.")] = None,
    train_vocab_multiple: Annotated[Whole, typer.Option(help="A rank's vocabulary: a multiple of this.")] = None,
    strict_gradients: Annotated[Switch, typer.Option(help="Gradients alike in every layout.")] = None,
    gradient_segments: Annotated[Whole, typer.Option(help="Runs of samples whose gradients add apart.")] = None,
    train_transport: Annotated[Text, typer.Option(help="gloo, shared_memory (CPU) or peer_memory (GPUs).")] = None,
    weight_transfer: Annotated[Text, typer.Option(help="files or cuda_ipc.")] = None,
    rollout_engines: Annotated[Whole, typer.Option(help="vLLM engines.")] = None,
    rollout_tp: Annotated[Whole, typer.Option(help="Tensor parallelism of an engine.")] = None,
    rollout_graphs: Annotated[Switch, typer.Option(help="Captured graphs of engines on a GPU.")] = None,
    kv_cache_gib: Annotated[Real, typer.Option(help="GiB of an engine worker for keys and values.")] = None,
    max_num_seqs: Annotated[Whole, typer.Option(help="Responses that an engine computes at once.")] = None,
    max_num_batched_tokens: Annotated[Whole, typer.Option(help="Tokens of one step of an engine.")] = None,
    native_compile: Annotated[Switch, typer.Option(help="Native vLLM in its compiled mode.")] = None,
    max_tp: Annotated[Whole, typer.Option(help="K segments of row-parallel layers.")] = None,
    threads: Annotated[Whole, typer.Option(help="CPU threads per process; 0: a fair share.")] = None,
    tensorboard: Annotated[Switch, typer.Option(help="TensorBoard files in RUN_DIR/tracking.")] = None,
    wandb: Annotated[Text, typer.Option(help="Weights & Biases: off, offline or online.")] = None,
    wandb_project: Annotated[Text, typer.Option(help="Project name for Weights & Biases.")] = None,
    start_timeout: Annotated[Real, typer.Option(help="Seconds an engine or trainer may take to start.")] = None,
    step_timeout: Annotated[Real, typer.Option(help="Seconds one call to it may take.")] = None,
) -> None:
    """Train with reinforcement learning and compare every log-probability, bit by bit.

    A flag that is left out has its default: `samebits run --print-config toml` shows and explains them all.
    Exit codes: 0 all bits the same, 1 some differ, 2 cannot tell (bad input, a failure), 130 interrupted.
    """
    from samebits.cli.run import run_command

    flags = {name: value for name, value in context.params.items() if name not in RUN_OWN and value is not None}
    raise typer.Exit(run_command(flags, config, print_config, debug, matrix, matrix_dir))


@app.command(
    short_help="Which module makes the difference: one job, arm by arm.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def ablate(
    context: typer.Context,
    config: Annotated[Optional[Path], typer.Option(help="TOML file; flags override it.")] = None,  # noqa: UP045
    run_dir: Annotated[Path, typer.Option(help="Where the arms and the table go.")] = Path("runs/ablate"),
    arm: Annotated[list[str], typer.Option(help="M101, or attention=P/R; repeat it. Left out: M000 to M111.")] = [],  # noqa: B006
    cases_of: Annotated[list[str], typer.Option(help="attention, ffn or logp: its four cases, others R/R.")] = [],  # noqa: B006
    view: Annotated[str, typer.Option(help="free, equal (it needs free) or both.")] = "both",
    tokens_of: Annotated[Text, typer.Option(help="The arm whose tokens the equal view replays.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Run the same job with each module on either route, and say which module makes the difference.

    Takes the settings of `samebits run` besides its own. Started again on the same folder it goes on where it
    stopped. Exit codes: 0 every arm has its proof and fully strict arms are the same, 1 one of these differs,
    2 cannot tell, 130 interrupted.
    """
    from samebits.cli.ablate import ablate_command

    flags = run_settings(context.args)
    raise typer.Exit(ablate_command(flags, config, run_dir, arm, cases_of, view, tokens_of, debug))


def run_settings(words: list[str]) -> dict[str, object]:
    """The settings among command-line words, parsed as `samebits run` parses them; wrong ones end the program."""
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    context = command.make_context("samebits ablate", list(words))
    for name in RUN_OWN:
        if context.params.get(name) not in (None, False):
            raise typer.BadParameter(f"--{name.replace('_', '-')} belongs to `samebits run`")
    # A 0 or a False is an answer: only what was left out is None.
    return {name: value for name, value in context.params.items() if name not in RUN_OWN and value is not None}


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="A run directory, or an ablation's.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Recompute a verdict from the records alone. Exit codes: 0 same, 1 different, 2 cannot tell."""
    from samebits.ablate import check
    from samebits.evidence import verify as records

    if check.is_ablation(run):
        ablation = check.verify_ablation(run)
        typer.echo(check.to_json(ablation) if as_json else check.describe(ablation))
        raise typer.Exit(ablation.verdict.exit_code)
    found = records.verify(run)
    typer.echo(records.to_json(found) if as_json else records.describe(found))
    raise typer.Exit(found.verdict.exit_code)


@app.command(short_help="Name the first boundary, layer and token that differ, and why.")
def locate(
    context: typer.Context,
    run: Annotated[Optional[Path], typer.Argument(help="A run directory.")] = None,  # noqa: UP045
    sample: Annotated[Text, typer.Option(help="step/prompt/sample; left out: the first that differs.")] = None,
    token: Annotated[Whole, typer.Option(help="Token of the response; left out: the first that differs.")] = None,
    linear_logp_provider: Annotated[Text, typer.Option(help="Another provider that the run may name.")] = None,
    trainer_model: Annotated[Text, typer.Option(help="Instead of a run: the trainer's model.")] = None,
    rollout_model: Annotated[Text, typer.Option(help="The rollout side's model; left out: the trainer's.")] = None,
    trainer_case: Annotated[str, typer.Option(help="R, P, or attention=R,ffn=P,logp=R.")] = "R",
    rollout_case: Annotated[str, typer.Option(help="As --trainer-case.")] = "R",
    trainer_tp: Annotated[int, typer.Option(help="Trainer's tensor parallelism.")] = 1,
    trainer_cp: Annotated[int, typer.Option(help="Trainer's context parallelism.")] = 1,
    rollout_tp: Annotated[int, typer.Option(help="Tensor parallelism of the engine.")] = 1,
    max_tp: Annotated[Whole, typer.Option(help="K segments of row-parallel layers.")] = None,
    native_compile: Annotated[bool, typer.Option(help="Native vLLM, compiled.")] = False,
    temperature: Annotated[float, typer.Option(help="Of the draws and the log-probabilities.")] = 1.0,
    prompt: Annotated[Text, typer.Option(help="A user's message.")] = None,
    prompt_ids: Annotated[Text, typer.Option(help="Token ids instead of a prompt: 5,17,3.")] = None,
    response_ids: Annotated[Text, typer.Option(help="Token ids of a response; left out: it is generated.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    out: Annotated[Optional[Path], typer.Option(help="Where the repro goes; RUN/locate or locate.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Compute a token again on both sides and name the first boundary that differs, its values and its cause.

    Writes a repro that needs neither engine. Exit codes: 0 all agrees, 1 located, 2 cannot tell, 130 interrupted.
    """
    from samebits.cli.locate import ByHand, locate_command

    if run is None:
        _refuse_idle(context, ("sample", "token", "linear_logp_provider"), "without a run")
    else:
        _refuse_idle(context, ByHand.__annotations__, "beside a run, which has its own settings")
    if prompt_ids is not None:
        _refuse_idle(context, ("prompt",), "beside --prompt-ids")
    if response_ids is not None:
        _refuse_idle(context, ("max_tokens", "seed"), "beside --response-ids")
    by_hand = None
    if trainer_model is not None:
        by_hand = ByHand(
            trainer_model=trainer_model,
            rollout_model=rollout_model or trainer_model,
            trainer_case=trainer_case,
            rollout_case=rollout_case,
            trainer_tp=trainer_tp,
            trainer_cp=trainer_cp,
            rollout_tp=rollout_tp,
            max_tp=max_tp,
            native_compile=native_compile,
            temperature=temperature,
            prompt=prompt,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            max_tokens=max_tokens,
            seed=seed,
        )
    raise typer.Exit(locate_command(run, by_hand, sample, token, linear_logp_provider, out, as_json, debug))


def _refuse_idle(context: typer.Context, names: Iterable[str], where: str) -> None:
    """Ends the program where one of these options was given: they mean nothing there."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name.replace('_', '-')} means nothing {where}: leave it out")


@app.command(short_help="Render the page of a run, an ablation, or several runs.")
def report(
    runs: Annotated[list[Path], typer.Argument(help="A run, an ablation, or several runs to compare.")],
    out: Annotated[Optional[Path], typer.Option(help="The page; RUN/report.html or comparison.html.")] = None,  # noqa: UP045
    terminal: Annotated[bool, typer.Option("--terminal", help="As text, here.")] = False,
) -> None:
    """Render the page of a run, sealed or not, of an ablation, or one that compares several runs."""
    from samebits.cli.report import report_command

    try:
        report_command(runs, out, terminal)
    except (OSError, ValueError) as error:
        raise typer.Exit(_complain(error)) from error


@app.command(short_help="What is installed here, and whether its bits are right.")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    seconds: Annotated[float, typer.Option(min=0, help="For the self-check of bits; 0: none.")] = 10.0,
) -> None:
    """What is installed here, what it promises, and whether its bits are right: for a bug report.

    Exit code 2 when a part is missing, an engine is not served, or the self-check finds a wrong bit.
    """
    from samebits.cli.doctor import doctor_command

    raise typer.Exit(doctor_command(as_json, seconds))


@contract_app.command("show")
def contract_show(
    boundary: Annotated[Text, typer.Argument(help="One boundary in full; all as a table if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print the boundaries: what each one's bits depend on, and in which order the parts merge."""
    from samebits.cli.contract import show_command

    raise typer.Exit(show_command(boundary, as_json))


@contract_app.command("docs")
def contract_docs(
    folder: Annotated[Path, typer.Option(help="Where the pages go.")] = Path("docs/contract"),
) -> None:
    """Write the pages about the boundaries, made from the boundaries."""
    from samebits.cli.contract import docs_command

    raise typer.Exit(docs_command(folder))


@bench_app.command("cpu", short_help="Each operator beside PyTorch's own on the same work.")
def bench_cpu(
    threads: Annotated[int, typer.Option(min=0, max=1024, help="Threads of both sides; 0: all cores.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Time per comparison.")] = 2.0,
    only: Annotated[str, typer.Option("--filter", help="Only what contains this text.")] = "",
    out: Annotated[Optional[Path], typer.Option(help="Write OUT.json and OUT.svg.")] = None,  # noqa: UP045
    matrix_unit: Annotated[bool, typer.Option(help="Whether the peer may use the processor's matrix unit.")] = True,
    show_list: Annotated[bool, typer.Option("--list", help="Only name the comparisons.")] = False,
) -> None:
    """Measure each operator beside PyTorch's own on the same work; a ratio above 1 means samebits is faster."""
    from samebits.cli.bench import bench_command

    try:
        code = bench_command(threads, seconds, only, out, matrix_unit, show_list)
    except OSError as error:
        code = _complain(error)
    raise typer.Exit(code)


def _complain(error: Exception) -> int:
    from samebits.cli.run import reason_of

    typer.echo(f"error: {reason_of(error)}", err=True)
    return 2


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that lacks a character costs no result
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="samebits")
    except Exception:  # noqa: BLE001 - Python's own exit code would be 1, and 1 says "different"
        traceback.print_exc()
        sys.exit(2)


if __name__ == "__main__":
    main()
