"""`rllm eval`: evaluate any agent function with any model."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rllm.cli import terminal
from rllm.cli.options import AsJson, CheckpointOfRun, ModelOrName, Reward, Server, ServerKind, Split, above_zero
from rllm.cli.terminal import CTRL_C

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.cli.model_source import ModelSource
    from rllm.evaluation.evaluate import Evaluation
    from rllm.evaluation.report import Report
    from rllm.gateway.upstream import UpstreamKind
    from rllm.trainer.config import TrainConfig


def evaluate(
    context: typer.Context,
    agent: Annotated[
        str | None, typer.Argument(help="The agent: FILE.py:function.", metavar="FILE.py:function", show_default=False)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Settings, such as sampling.max_tokens=512 or model.dtype=bfloat16.", metavar="KEY=VALUE"),
    ] = None,
    reward: Reward = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--data",
            "--dataset",
            help="Tasks: a file, the name of a registered dataset, or a hub id.",
            show_default=False,
        ),
    ] = None,
    split: Split = None,
    model: ModelOrName = None,
    checkpoint: CheckpointOfRun = None,
    base_url: Server = None,
    upstream_kind: ServerKind = "vllm",
    num_rollouts: Annotated[int, typer.Option("--n", "-n", help="Rollouts of each task.", min=1)] = 1,
    limit: Annotated[
        int | None, typer.Option(help="Number of tasks to use, from the start.", min=1, show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of every model call; by default the agent decides.", show_default=False),
    ] = None,
    max_concurrent: Annotated[int, typer.Option(help="Rollouts that run at a time.", min=1)] = 64,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a rollout counts as failed.", callback=above_zero)
    ] = 600.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the evaluation, by default one in evals/ named by the time; an existing one is continued.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            help="Show the difference between two finished evaluations, and exit.",
            metavar="FOLDER FOLDER",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate any agent: accuracy, pass@k, reward, cost, and reasons for failed rollouts.

    The function is called with the fields of each task as keyword arguments, as by `rllm train`. The same command
    with the same --out makes only missing and failed rollouts.
    """
    from rllm.cli.inputs import load_agent, tasks_for
    from rllm.cli.model_source import embedded, key_of_server, served
    from rllm.cli.training import announce, lead_to_gateway
    from rllm.errors import ConfigError

    started = time.perf_counter()
    if compare is not None:
        _compare(*compare, context, as_json=as_json)
        return
    if agent is None:
        raise ConfigError("the agent is missing: rllm eval FILE.py:function --data tasks.jsonl ...")
    if dataset is None:
        raise ConfigError(
            "--data is missing: name a .jsonl file with one task a line, a registered dataset, or a hub id"
        )
    model = _model(model, checkpoint, base_url, upstream_kind)
    key = key_of_server()  # before lead_to_gateway replaces it
    config, sampling = _settings(settings or [], model, temperature, served=base_url is not None)
    if base_url is None:
        announce(config)
    from rllm.evaluation.evaluate import Evaluation  # which imports torch

    config.gateway.port = lead_to_gateway(config)
    function = load_agent(agent, reward)
    data = tasks_for(function, dataset, split, option="--data")
    source = embedded(config, max_concurrent) if base_url is None else served(base_url, model, key, upstream_kind)
    folder = out or Path("evals") / time.strftime("%Y%m%d-%H%M%S")
    with Evaluation.opened(
        data,
        folder=folder,
        identity={**_identity_of(agent, reward), **source.identity},
        num_rollouts=num_rollouts,
        limit=limit,
        sampling=sampling,
    ) as evaluation:
        again = _resume_command(folder, given=out is not None)
        limits = {"max_concurrent": max_concurrent, "timeout_s": timeout, "num_retries": config.rollout.num_retries}
        _complete(evaluation, function, source, config, again=again, **limits)
        report = evaluation.report()
    title = f"{agent} on {dataset} with {source.name}"
    _show(report, title, folder, seconds=time.perf_counter() - started, as_json=as_json)


def _show(report: Report, title: str, folder: Path, *, seconds: float, as_json: bool) -> None:
    """Print the report.

    Raises:
        RolloutError: if it has no result for the model.
    """
    from rllm.cli.display import show_report
    from rllm.errors import RolloutError

    console = terminal.console(stderr=as_json)
    where = f"Details of each: {terminal.command()} {shlex.join(['explain', str(folder)])}"
    all_failed = report.num_failed == report.num_rollouts
    if not all_failed:
        show_report(console, title, report)
        if report.num_failed:
            console.print(where, soft_wrap=True, markup=False)
    if as_json:
        terminal.print_json({**report.to_dict(), "out": str(folder), "seconds": seconds})
    if all_failed:
        raise RolloutError(f"{_why_all_failed(report)}\n{where}")
    if report.num_failed + report.num_unscored == report.num_rollouts:
        raise RolloutError("no rollout was scored, so there is no result: let the agent return a reward")


def _model(model: str | None, checkpoint: str | None, base_url: str | None, kind: UpstreamKind) -> str | None:
    """Return the model's folder or hub id, or its name on the server.

    Raises:
        ConfigError: if an option has no effect beside the others.
    """
    from rllm.cli.model_source import folder_of, refuse_options_of_server
    from rllm.errors import ConfigError

    if base_url is None:
        refuse_options_of_server(kind)
        return None if model is None else folder_of(model, checkpoint)
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint} would have no effect with --base-url: the server holds the model")
    return model


def _compare(first: Path, second: Path, context: typer.Context, *, as_json: bool) -> None:
    from rllm.cli.display import show_comparison
    from rllm.errors import ConfigError
    from rllm.evaluation.compare import compare

    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        is_given = source is not None and source.name == "COMMANDLINE"  # newer versions of Typer have their own class
        if is_given and parameter.name not in ("compare", "as_json"):
            name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
            raise ConfigError(f"--compare takes two finished evaluations and evaluates nothing: leave {name} out")
    comparison = compare(first, second)
    show_comparison(terminal.console(stderr=as_json), first, second, comparison)
    if as_json:
        terminal.print_json(comparison.to_dict())


def _complete(
    evaluation: Evaluation,
    function: Callable[..., Any],
    source: ModelSource,
    config: TrainConfig,
    *,
    again: str,
    **limits: Any,
) -> None:
    """Make the missing rollouts. Ctrl-C ends the process and prints `again`, the command that continues."""
    console = terminal.console(stderr=True)
    console.print(
        f"Folder: {evaluation.folder.path}\nCtrl-C keeps finished rollouts; continue with: {again}",
        soft_wrap=True,
        markup=False,
    )
    if not evaluation.missing:
        console.print("All rollouts are done already.")
        return
    try:
        _make_missing(evaluation, function, source, config, console, **limits)
    except KeyboardInterrupt:
        kept = (
            f"{evaluation.num_done} of {evaluation.num_planned} rollouts are done and kept in {evaluation.folder.path}"
        )
        console.print(f"\nStopped. {kept}.\nContinue with: {again}", soft_wrap=True, markup=False)
        sys.exit(CTRL_C)


def _make_missing(
    evaluation: Evaluation,
    function: Callable[..., Any],
    source: ModelSource,
    config: TrainConfig,
    console: Console,
    **limits: Any,
) -> None:
    """Make the missing rollouts, with a gateway that stores traces beside the episodes."""
    from rllm.cli.display import EvaluationDisplay
    from rllm.engine.agent_function_engine import AgentFunctionEngine
    from rllm.engine.event_loop import run_to_end
    from rllm.gateway.config import GatewayConfig
    from rllm.gateway.server import GatewayServer
    from rllm.sdk.variables import run_key
    from rllm.store import open_store
    from rllm.trainer.episode_records import note_outcome

    # A call under way at the end belongs to a cancelled rollout, so nothing waits for it.
    settings = config.gateway
    listens = GatewayConfig.of_run(
        run_key(),
        host=settings.host,
        port=settings.port,
        exact_turns=settings.exact_turns,
        otel=settings.otel,
        shutdown_timeout_s=1.0,
    )
    with (
        source.upstream as upstream,
        closing(open_store(str(evaluation.folder.path / "traces.db"))) as store,
        GatewayServer(store, upstream, listens) as gateway,
        AgentFunctionEngine(function, gateway=gateway, store=store) as engine,
        closing(EvaluationDisplay(console)) as display,
    ):
        work = evaluation.run(engine, on_progress=display, on_episode=partial(note_outcome, store), **limits)
        run_to_end(_quiet_when_stopped(work))


def _why_all_failed(report: Report) -> str:
    from rllm.errors import all_of

    head = f"{all_of(report.num_rollouts, 'rollout')} failed, so there is no result:"
    return "\n  ".join([head, *map(str, report.failures[:3])])


async def _quiet_when_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run the work; after Ctrl-C log nothing more, since every rollout would log its cancellation."""
    from rllm._runtime.threads import UnboundedExecutor
    from rllm.engine.event_loop import ignore_interrupted_tasks

    ignore_interrupted_tasks()
    asyncio.get_running_loop().set_default_executor(UnboundedExecutor())
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        logging.disable(logging.ERROR)
        task.cancel()
        await asyncio.wait({task})
        raise


def _settings(
    pairs: Sequence[str], model: str | None, temperature: float | None, *, served: bool
) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the settings of `rllm train` that apply here, and the sampling parameters to impose."""
    from rllm.cli.model_source import given_of_training
    from rllm.config.loading import parse_scalar, warn_repeated
    from rllm.config.schema import refuse_changes
    from rllm.errors import ConfigError
    from rllm.gateway.sessions import check_sampling
    from rllm.trainer.config import load_config

    ours = ("gateway.", "rollout.num_retries=", *(() if served else ("model.", "seed=")))
    options = {"sampling.temperature": temperature, "model.path": None if served else model}
    pairs = [*pairs, *(f"{key}={value}" for key, value in options.items() if value is not None)]
    sampling: dict[str, Any] = {}
    rest = []
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if key.startswith("sampling.") and separator:
            sampling[key.removeprefix("sampling.")] = parse_scalar(text)
        elif pair.startswith(ours) or not separator:
            rest.append(pair)
        else:
            reason = "the server holds the model" if pair.startswith(("model.", "seed=")) else "it has no effect here"
            known = ", ".join(name if name.endswith("=") else f"{name}NAME=" for name in ("sampling.", *ours))
            raise ConfigError(f"{pair}: {reason}; rllm eval takes the settings {known}")
    warn_repeated(pair for pair in pairs if pair not in rest)  # load_config does it for the rest
    config = load_config(rest)
    refuse_changes(config.model, "model", given_of_training(rest), "because nothing is trained here; leave it out")
    if any(pair.startswith("model.engine=") for pair in rest):
        why = "since the model answers in this process; start `rllm serve`, and pass its address with --base-url"
        refuse_changes(config.model, "model", ["engine"], why)
    if not served and not config.model.path:
        raise ConfigError("--model is missing: name a model folder or hub id, or a server with --base-url URL")
    return config, check_sampling(sampling)


def _identity_of(agent: str, reward: str | None) -> dict[str, str]:
    judge = {} if reward is None else {"reward": _agent_identity(reward)}
    return {"agent": _agent_identity(agent), **judge}


def _agent_identity(agent: str) -> str:
    """Return the function's name and a digest of its file; imports are not included."""
    from rllm.evaluation.folder import file_identity

    place, _, name = agent.rpartition(":")
    file = place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)
    if file is None:
        return agent
    path = Path(file).expanduser()
    return f"{path.name}:{name} ({file_identity(path)})"


def _resume_command(folder: Path, *, given: bool) -> str:
    return f"{terminal.command()} {shlex.join([*sys.argv[1:], *([] if given else ['--out', str(folder)])])}"
