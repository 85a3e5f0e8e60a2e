"""`rllm eval`: evaluate any agent function with any model."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rllm._runtime.files import new_folder
from rllm.cli import terminal
from rllm.cli.options import (
    AsJson,
    CheckpointOfRun,
    Env,
    ModelOrName,
    Reward,
    Sandbox,
    SandboxAgent,
    Server,
    ServerKind,
    Split,
    above_zero,
    leading_setting,
    optional,
)
from rllm.cli.terminal import CTRL_C
from rllm.errors import ConfigError, RolloutError, all_of

if TYPE_CHECKING:
    from rllm.cli.inputs import ModelSource
    from rllm.data.dataset import Dataset
    from rllm.environments.named import NamedEnvironment
    from rllm.evaluation.evaluate import Evaluation
    from rllm.evaluation.report import Report
    from rllm.trainer.config import TrainConfig
    from rllm.trainer.rollout_sources import RolloutSource
    from rllm.types import JSONObject


def evaluate(
    context: typer.Context,
    agent: Annotated[
        str | None,
        typer.Argument(
            help="The agent, FILE.py:function, or a benchmark such as gsm8k, which is asked for each task once; with "
            "--agent, a task folder or a folder of them.",
            metavar="FILE.py:function",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Settings, such as sampling.max_tokens=512 or model.dtype=bfloat16.", metavar="KEY=VALUE"),
    ] = None,
    env: Env = None,
    sandbox_agent: SandboxAgent = None,
    sandbox: Sandbox = None,
    reward: Reward = None,
    dataset: Annotated[
        str | None,
        optional(
            "Tasks: a file, the name of a registered dataset or a benchmark, or a hub id. Instead of an agent, a "
            "benchmark takes a file with rows of its dataset.",
            "--data",
            "--dataset",
        ),
    ] = None,
    split: Split = None,
    model: ModelOrName = None,
    checkpoint: CheckpointOfRun = None,
    base_url: Server = None,
    upstream_kind: ServerKind = "vllm",
    num_rollouts: Annotated[int, typer.Option("--n", "-n", help="Rollouts of each task.", min=1)] = 1,
    limit: Annotated[int | None, optional("Number of tasks to use, from the start.", min=1)] = None,
    temperature: Annotated[
        float | None, optional("Temperature of every model call; by default the agent decides.")
    ] = None,
    max_concurrent: Annotated[int, typer.Option(help="Number of rollouts that run at the same time.", min=1)] = 64,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a rollout counts as failed.", callback=above_zero)
    ] = 600.0,
    out: Annotated[
        Path | None,
        optional("Folder of the evaluation, by default one in evals/ named by the time; an existing one is continued."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        optional("Show the difference between two finished evaluations, and exit.", metavar="FOLDER FOLDER"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate any agent, or a model on a benchmark: accuracy, pass@k, reward, cost, and reasons for failed rollouts.

    The function is called with the fields of each task as keyword arguments, as by `rllm train`. The same command
    with the same --out makes only missing and failed rollouts.
    """
    from rllm.cli.inputs import (
        embedded,
        key_of_server,
        load_reward,
        no_model,
        served,
        settle_work,
        tasks_in_sandboxes,
    )
    from rllm.cli.training import lead_to_gateway
    from rllm.data.benchmarks import BENCHMARKS
    from rllm.environments.named import open_env
    from rllm.environments.textarena import PastPolicies

    if compare is not None:
        _compare(context, compare, as_json=as_json)
        return
    started = time.perf_counter()
    agent, settings = leading_setting(agent, settings)
    if (in_sandboxes := tasks_in_sandboxes(agent, env, sandbox_agent, sandbox)) is not None:
        agent, env = None, in_sandboxes
    named_work = {"agent": agent, "env": env, "data": None if dataset is None else [dataset], "split": split}
    work: JSONObject = {name: value for name, value in named_work.items() if value is not None}
    benchmark = settle_work("eval", work)
    env, dataset = work.get("env"), next(iter(work.get("data", ())), None)
    model = _model(model, checkpoint, base_url, upstream_kind)
    key = key_of_server()  # before lead_to_gateway replaces it
    config, sampling = _settings(settings, model, temperature, served=base_url is not None)
    if benchmark is not None:
        sampling = {**BENCHMARKS[benchmark].sampling, **sampling}
    config.gateway.port = lead_to_gateway(config)
    config.rollout.max_concurrent, config.rollout.timeout_s = max_concurrent, timeout
    named = None if env is None else open_env(env, sandbox=config.sandbox)
    _announce_model(config, named, base_url, model)
    from rllm.config.schema import refuse_changes
    from rllm.engine.scoring import Scoring
    from rllm.evaluation.evaluate import Evaluation  # which imports torch
    from rllm.rewards.scoring import AddedReward, keep_verdicts

    rollouts, data = _work(agent, named, reward, dataset, split, benchmark, config)
    if PastPolicies.of(data) is not None:
        raise ConfigError("opponent=start and pool are earlier policies of a training run: use self, random or a URL")
    if reward is None and benchmark is None:
        refuse_changes(config.reward, "reward", ["timeout_s"], "without --reward; leave it out")
    scored_by = rollouts.reward if named is None or reward is None else AddedReward(load_reward(reward))
    scoring = Scoring.of(scored_by, config.reward, timeout_s=timeout)
    if named is not None and not named.uses_model:
        source = no_model()
    else:
        source = embedded(config, max_concurrent) if base_url is None else served(base_url, model, key, upstream_kind)
    folder = out or new_folder(Path("evals"))
    about = {"agent": agent, **({} if named is None else named.about), "reward": reward}
    made_by = {"env": env, **{name: value and _identity_of(value) for name, value in about.items()}}
    identity = {**{name: value for name, value in made_by.items() if value}, **source.identity}
    with Evaluation.opened(
        data,
        folder=folder,
        identity=identity,
        num_rollouts=num_rollouts,
        limit=limit,
        sampling=sampling,
        scoring=scoring,
    ) as evaluation:
        keep_verdicts(scored_by, folder)
        again = shlex.join(["rllm", *sys.argv[1:], *([] if out else ["--out", str(folder)])])
        _complete(evaluation, rollouts, source, config, again)
        report = evaluation.report({} if benchmark is None else BENCHMARKS[benchmark].ratios)
    title = f"{' on '.join(dict.fromkeys(filter(None, (agent, env or dataset))))} with {source.name}"
    _show(report, title, folder, seconds=time.perf_counter() - started, as_json=as_json)


def _compare(context: typer.Context, folders: tuple[Path, Path], *, as_json: bool) -> None:
    from rllm.cli.display import show_comparison
    from rllm.evaluation.folder import compare as compared

    for parameter in context.command.params:
        origin = context.get_parameter_source(parameter.name or "")
        if getattr(origin, "name", "") == "COMMANDLINE" and parameter.name not in ("compare", "as_json"):
            name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
            raise ConfigError(f"--compare takes two finished evaluations and evaluates nothing: leave out {name}")
    comparison = compared(*folders)
    show_comparison(terminal.console(stderr=as_json), *folders, comparison)
    if as_json:
        terminal.print_json(comparison.to_dict())


def _work(
    agent: str | None,
    env: NamedEnvironment | None,
    reward: str | None,
    dataset: str | None,
    split: str | None,
    benchmark: str | None,
    config: TrainConfig,
) -> tuple[RolloutSource, Dataset]:
    """Return the source of the rollouts, and the tasks."""
    from rllm.cli.inputs import agent_in_env, load_agent, tasks_for
    from rllm.config.schema import refuse_changes
    from rllm.rewards.scoring import with_deadline
    from rllm.trainer.rollout_sources import FunctionSource, source_in

    if env is not None:
        return source_in(env, **agent_in_env(agent)), env.tasks
    assert agent is not None
    assert dataset is not None
    refuse_changes(config.sandbox, "sandbox", type(config.sandbox).model_fields, "without tasks in sandboxes")
    function = with_deadline(load_agent(agent, reward), config.reward.timeout_s)
    data = tasks_for(function, dataset, split, option="--data", benchmark=benchmark, benchmark_split="test")
    return FunctionSource(agent_run_func=function), data


def _show(report: Report, title: str, folder: Path, *, seconds: float, as_json: bool) -> None:
    from rllm.cli.display import show_report

    console = terminal.console(stderr=as_json)
    where = f"Details of each: rllm {shlex.join(['explain', str(folder)])}"
    all_failed = report.num_failed == report.num_rollouts
    if not all_failed:
        show_report(console, title, report)
        console.print(where, soft_wrap=True, markup=False)
    if as_json:
        terminal.print_json({**report.to_dict(), "out": str(folder), "seconds": seconds})
    if all_failed:
        head = f"{all_of(report.num_rollouts, 'rollout')} failed, so there is no result:"
        raise RolloutError("\n  ".join([head, *map(str, report.failures[:3])]) + f"\n{where}")
    if report.accuracy is None:
        raise RolloutError("no rollout was scored, so there is no result: the agent or --reward must return a reward")


def _model(model: str | None, checkpoint: str | None, base_url: str | None, kind: ServerKind) -> str | None:
    """Return the model's folder or hub id, or its name on the server."""
    from rllm.cli.inputs import folder_of, refuse_options_of_server

    if base_url is None:
        refuse_options_of_server(kind)
        return None if model is None else folder_of(model, checkpoint)
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint} would have no effect with --base-url: the server holds the model")
    return model


def _announce_model(config: TrainConfig, env: NamedEnvironment | None, base_url: str | None, model: str | None) -> None:
    """Print which model is loaded in this process, if one is.

    Raises:
        ConfigError: if none is named.
    """
    from rllm.cli.training import announce

    if env is not None and not env.uses_model:
        if unused := base_url or model:
            message = f"agent={env.about['agent']} calls no model, so {unused} is not used."
            terminal.console(stderr=True).print(message, soft_wrap=True, markup=False)
    elif base_url is None:
        if not config.model.path:
            raise ConfigError("--model is missing: name a model folder or hub id, or a server with --base-url URL")
        announce(config)


def _complete(
    evaluation: Evaluation, rollouts: RolloutSource, source: ModelSource, config: TrainConfig, again: str
) -> None:
    """Make the missing rollouts, with a gateway that stores traces next to the episodes.

    Ctrl-C ends the process and prints `again`, the command that continues.
    """
    from rllm.cli.display import EvaluationDisplay
    from rllm.engine.event_loop import run_to_end
    from rllm.gateway.server import GatewayServer
    from rllm.store import open_store
    from rllm.trainer.episode_records import note_outcome
    from rllm.trainer.rollout_sources import RolloutContext
    from rllm.trainer.rollouts import gateway_config

    console = terminal.console(stderr=True)
    folder = evaluation.folder.path
    console.print(
        f"Folder: {folder}\nCtrl-C keeps finished rollouts; continue with: {again}", soft_wrap=True, markup=False
    )
    if not evaluation.missing:
        console.print("All rollouts are done already.")
        return
    rollout = config.rollout
    try:
        with (
            source.upstream as upstream,
            closing(open_store(str(folder / "traces.db"))) as store,
            GatewayServer(store, upstream, gateway_config(config)) as gateway,
            rollouts.open(
                RolloutContext(inference=source.engine_of(upstream), gateway=gateway, store=store, rollout=rollout)
            ) as engine,
            closing(EvaluationDisplay(console)) as display,
        ):
            work = evaluation.run(
                engine,
                max_concurrent=rollout.max_concurrent,
                timeout_s=rollout.timeout_s,
                num_retries=rollout.num_retries,
                on_progress=display,
                on_episode=partial(note_outcome, store),
            )
            run_to_end(_quiet_when_stopped(work, source))
    except KeyboardInterrupt:
        kept = f"{evaluation.num_done} of {evaluation.num_planned} rollouts are done and kept in {folder}"
        console.print(f"\nStopped. {kept}.\nContinue with: {again}", soft_wrap=True, markup=False)
        sys.exit(CTRL_C)


async def _quiet_when_stopped(work: Coroutine[object, object, None], source: ModelSource) -> None:
    """Run the work; after Ctrl-C log nothing more, since every rollout would log its cancellation.

    At the end the connections to the model's server are closed, in the event loop that opened them.
    """
    from rllm._runtime.threads import UnboundedExecutor

    asyncio.get_running_loop().set_default_executor(UnboundedExecutor())
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        logging.disable(logging.ERROR)
        task.cancel()
        await asyncio.wait({task})
        raise
    finally:
        if source.server is not None:
            await source.server.close()


_OPTIONS = {"rollout.timeout_s": "--timeout", "rollout.group_size": "--n", "rollout.max_concurrent": "--max-concurrent"}
"""Options that replace settings of training."""
_OF_MODEL = ("model.", "seed=")


def _settings(
    pairs: Sequence[str], model: str | None, temperature: float | None, *, served: bool
) -> tuple[TrainConfig, JSONObject]:
    """Return the settings of `rllm train` that apply here, and the sampling parameters to impose."""
    from rllm.cli.inputs import settings_to_serve
    from rllm.config.loading import parse_scalar, warn_repeated
    from rllm.config.schema import refuse_changes
    from rllm.gateway.sessions import check_sampling

    options = {"sampling.temperature": temperature, "model.path": None if served else model}
    pairs = [*pairs, *(f"{key}={value}" for key, value in options.items() if value is not None)]
    sampling: JSONObject = {}
    rest = []
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if key.startswith("sampling.") and separator:
            sampling[key.removeprefix("sampling.")] = parse_scalar(text)
        elif key in _OPTIONS:
            raise ConfigError(f"{pair} would have no effect; use {_OPTIONS[key]}")
        elif served and pair.startswith(_OF_MODEL):
            raise ConfigError(f"{pair}: the server holds the model; leave it out")
        else:
            rest.append(pair)
    warn_repeated(pair for pair in pairs if pair not in rest)  # loading does it for the rest
    sections = ("sampling.", "gateway.", "reward.", "sandbox.", "rollout.num_retries=", "rollout.max_steps=")
    config = settings_to_serve("eval", rest, (*sections, *_OF_MODEL))
    if any(pair.startswith("model.engine=") for pair in rest):
        why = "since the model answers in this process; start `rllm serve`, and pass its address with --base-url"
        refuse_changes(config.model, "model", ["engine"], why)
    return config, check_sampling(sampling)


def _identity_of(function: str) -> str:
    """Return the function's name and a digest of its file; imports are not included."""
    from rllm.evaluation.folder import file_identity

    place, _, name = function.rpartition(":")
    if place == "judge" and name.endswith((".yaml", ".yml")):
        return f"{function} ({file_identity(Path(name).expanduser())})"
    file = place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)
    if file is None:
        return function
    path = Path(file).expanduser()
    return f"{path.name}:{name} ({file_identity(path)})"
