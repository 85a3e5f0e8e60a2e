"""`rllm train` and `rllm sft`: train the policy behind an agent, or fine-tune a model on conversations."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rllm.cli.options import (
    Env,
    Reward,
    RunOptions,
    Sandbox,
    SandboxAgent,
    as_typed,
    leading_setting,
    optional,
    with_options,
)
from rllm.errors import ConfigError

if TYPE_CHECKING:
    from rllm.data.dataset import Dataset
    from rllm.tracking.about import Beginning


@with_options
def train(
    agent: Annotated[
        str | None,
        typer.Argument(
            help="Agent: FILE.py:function, or a benchmark with a training split, such as gsm8k. "
            "With --agent, a task folder or a folder of them. With --resume this and other arguments default to those "
            "of the run.",
            metavar="FILE.py:function",
            show_default=False,
        ),
    ] = None,
    *,
    options: RunOptions,
    env: Env = None,
    sandbox_agent: SandboxAgent = None,
    sandbox: Sandbox = None,
    reward: Reward = None,
    data: Annotated[
        list[str] | None,
        optional(
            "Tasks to train on: a file, the name of a registered dataset or a benchmark, or a hub id. Repeat it for "
            "several datasets, which data.weights=[...] weighs."
        ),
    ] = None,
    from_sessions: Annotated[
        str | None,
        optional(
            "Learn online from the sessions of users in this store of a gateway, instead of from an agent and --data: "
            "as their rewards arrive by POST /sessions/ID/reward.",
            metavar="STORE",
        ),
    ] = None,
    backend: Annotated[str | None, optional("Backend that trains: local or verl; the same as backend=...")] = None,
    ray_address: Annotated[str | None, optional("Ray cluster, host:port or auto; the same as ray.address=...")] = None,
) -> None:
    """Train the policy behind any agent: an ordinary function that returns its reward, or a result for --reward.

    The function is called with the fields of each task as keyword arguments. Its model calls go to OPENAI_BASE_URL,
    which is set for it. The run is written to the folder run_dir=..., by default one in runs/ named by the time.

    With --env, tasks and rewards come from an environment, --reward is added to its rewards, and the agent is optional:
    a function, which also gets the environment as env, or a BaseAgent class, FILE.py:Class.
    """
    from rllm.cli import inputs
    from rllm.cli.training import (
        announce,
        begun_as,
        carry_out,
        chosen_settings,
        lead_to_gateway,
        quiet_libraries,
    )
    from rllm.environments.named import open_env

    started = time.perf_counter()
    agent, settings = leading_setting(agent, options.settings)
    if (in_sandboxes := inputs.tasks_in_sandboxes(agent, env, sandbox_agent, sandbox)) is not None:
        agent, env = None, in_sandboxes
    given = {"agent": agent, "env": env, "reward": reward, "data": data, "from_sessions": from_sessions}
    begun = begun_as("train", options, **given)
    if "from_sessions" in begun:
        _train_online(begun, settings, options, {"backend": backend, "ray.address": ray_address}, started)
        return
    if options.resume is not None and "env" not in begun and not {"agent", "data"} <= begun.keys():
        raise ConfigError(
            f"--resume {options.resume}: the run was not started by a command, so arguments are missing; resume it in "
            "its program with AgentTrainer(..., resume=True), or give the agent and --data"
        )
    benchmark = inputs.settle_work("train", begun)
    config, layers = chosen_settings(settings, options, {"backend": backend, "ray.address": ray_address})
    port = lead_to_gateway(config)
    work: dict[str, Any] = {}
    if "env" in begun:
        work["env"] = named = open_env(begun["env"], sandbox=config.sandbox)
        named.check_trainable()
    announce(config, dry_run=options.dry_run)
    if "env" in begun:
        held_out = inputs.env_of_file(begun.get("val")) or begun.get("val")
        added = inputs.load_reward(begun["reward"]) if "reward" in begun else None
        work |= {**inputs.agent_in_env(begun.get("agent")), "val_dataset": held_out, "reward": added}
    else:
        function = inputs.load_agent(begun["agent"], begun.get("reward"))
        read = partial(inputs.tasks_for, function, benchmark=benchmark)
        tasks = [read(path, begun.get("split"), option="--data", benchmark_split="train") for path in begun["data"]]
        work = {"agent_run_func": function, "train_dataset": tasks}
        if "val" in begun:
            work["val_dataset"] = read(begun["val"], begun.get("val_split"), option="--val", benchmark_split="test")
    quiet_libraries()  # slow imports, as below
    from rllm.config.loading import locating_errors
    from rllm.trainer.agent_trainer import AgentTrainer

    with as_typed(train_dataset="--data", val_dataset="--val", env="--env"), locating_errors(layers):
        trainer = AgentTrainer(**work, config=config, resume=options.resume is not None)
    carry_out(trainer, layers, options, begun=begun, started=started, port=port, measure="accuracy")


def _train_online(
    begun: Beginning, settings: list[str], options: RunOptions, others: dict[str, str | None], started: float
) -> None:
    from rllm.cli.terminal import console
    from rllm.cli.training import announce, carry_out, chosen_settings, quiet_libraries

    if unused := [name for name in ("agent", "env", "reward", "data", "val") if name in begun]:
        name = "the agent" if unused[0] == "agent" else f"--{unused[0]}"
        raise ConfigError(f"--from-sessions {begun['from_sessions']}: leave out {name}, since users make the sessions")
    config, layers = chosen_settings(settings, options, others)
    announce(config, dry_run=options.dry_run)
    quiet_libraries()
    from rllm.config.loading import locating_errors
    from rllm.trainer.online import serving_notice, session_trainer

    resumed = config.store if options.resume is not None else None
    with locating_errors(layers):
        trainer = session_trainer(resumed or begun["from_sessions"], config, resume=options.resume is not None)
    if not options.dry_run:
        console(stderr=True).print(serving_notice(trainer.config), soft_wrap=True, markup=False)
    carry_out(trainer, layers, options, begun=begun, started=started, measure="accuracy")


@with_options
def sft(
    data: Annotated[
        str | None,
        typer.Argument(
            help="Conversations: a file, the name of a registered dataset, or a hub id; or the folder of a run or an "
            "evaluation, or a .db file of traces. With --resume, the run's data by default.",
            metavar="DATA",
            show_default=False,
        ),
    ] = None,
    *,
    options: RunOptions,
) -> None:
    """Fine-tune a model on conversations: rows with `messages`, and with `tools` where they were offered.

    Rollouts of an earlier run or evaluation, and scored sessions of a gateway, are learned token for token;
    sft.reward_threshold and sft.best_per_task select the best.
    """
    from rllm.cli.training import announce, begun_as, carry_out, chosen_settings, quiet_libraries

    started = time.perf_counter()
    data, settings = leading_setting(data, options.settings)
    begun = begun_as("sft", options, data=data)
    if "data" not in begun:
        raise ConfigError(
            "DATA is missing: name a .jsonl file of conversations, a registered dataset, or a run's folder"
        )
    config, layers = chosen_settings(settings, options)
    announce(config, dry_run=options.dry_run)
    shown = _demonstrations(begun["data"], begun.get("split"), "DATA")
    held_out = _demonstrations(begun["val"], begun.get("val_split"), "--val") if "val" in begun else None
    quiet_libraries()  # slow imports, as below
    from rllm.config.loading import locating_errors
    from rllm.trainer.agent_sft_trainer import AgentSFTTrainer

    with as_typed(train_dataset="DATA", val_dataset="--val"), locating_errors(layers):
        trainer = AgentSFTTrainer(config, shown, held_out, resume=options.resume is not None)
    carry_out(trainer, layers, options, begun=begun, started=started, measure="loss")


def _demonstrations(source: str, split: str | None, option: str) -> str | Dataset:
    """Return a run or an evaluation as it is, since the trainer reads it; read any other source."""
    from rllm.cli.inputs import read_tasks
    from rllm.trainer.episode_records import named_store

    return source if named_store(source) else read_tasks(source, split, option=option)
