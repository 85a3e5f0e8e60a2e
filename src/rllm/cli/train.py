"""`rllm train`: train the policy behind any agent function."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from rllm.cli.options import (
    AsJson,
    Backend,
    Config,
    DryRun,
    Model,
    RayAddress,
    Resume,
    Reward,
    Settings,
    Split,
    ValSplit,
)
from rllm.errors import ConfigError


def train(
    agent: Annotated[
        str | None,
        typer.Argument(
            help="The agent: FILE.py:function. With --resume it is the run's own, and so is all that is not given.",
            metavar="FILE.py:function",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    reward: Reward = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Tasks to learn from: a file, the name of a registered dataset, or a hub id.", show_default=False
        ),
    ] = None,
    val: Annotated[
        str | None, typer.Option(help="Held-out tasks, for evaluation only; likewise.", show_default=False)
    ] = None,
    split: Split = None,
    val_split: ValSplit = None,
    model: Model = None,
    backend: Backend = None,
    ray_address: RayAddress = None,
    config: Config = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train the policy behind any agent: an ordinary function that returns its reward, or what --reward judges.

    The function is called with the fields of each task as keyword arguments. Its model calls go to OPENAI_BASE_URL, which
    is set for it. All that the run leaves goes to the folder run_dir=..., or to one of runs/ that is named by the time.
    """
    from rllm.cli.agent_file import load_agent
    from rllm.cli.resuming import begun_as, leading_setting
    from rllm.cli.task_source import tasks_for
    from rllm.cli.training import (
        accuracies,
        announce,
        as_typed,
        carry_out,
        chosen_settings,
        lead_to_gateway,
        quiet_libraries,
    )

    started = time.perf_counter()
    agent, settings = leading_setting(agent, settings)
    given = {"agent": agent, "reward": reward, "data": data, "split": split, "val": val, "val_split": val_split}
    begun = begun_as("train", given, resume=resume)
    _check_arguments(begun, resume)
    chosen = chosen_settings(
        settings, model=model, config=config, resume=resume, backend=backend, ray_address=ray_address
    )
    if not dry_run:
        announce(chosen.config)
    port = lead_to_gateway(chosen.config)
    function = load_agent(begun["agent"], begun.get("reward"))
    tasks = tasks_for(function, begun["data"], begun.get("split"), option="--data")
    held_out = tasks_for(function, begun["val"], begun.get("val_split"), option="--val") if "val" in begun else None
    quiet_libraries()  # which takes its time, as does what follows
    from rllm.config.loading import locating_errors
    from rllm.trainer.agent_trainer import AgentTrainer

    with as_typed(train_dataset="--data", val_dataset="--val"), locating_errors(chosen.layers):
        trainer = AgentTrainer(
            agent_run_func=function,
            train_dataset=tasks,
            val_dataset=held_out,
            config=chosen.config,
            resume=resume is not None,
        )
    carry_out(
        trainer,
        chosen,
        begun=begun,
        started=started,
        dry_run=dry_run,
        port=port,
        outcome=("accuracy", accuracies) if as_json else None,
    )


def _check_arguments(begun: Mapping[str, str], resume: Path | None) -> None:
    unknown = ""
    if resume is not None:
        unknown = (
            f"--resume {resume}: no command began the run, so it does not name everything; the program that did goes on with "
            "AgentTrainer(..., resume=True); here "
        )
    if "agent" not in begun:
        raise ConfigError(f"{unknown}the agent is missing: rllm train FILE.py:function --data tasks.jsonl ...")
    if "data" not in begun:
        raise ConfigError(
            f"{unknown}--data is missing: name a .jsonl file with one task a line, a registered dataset, or a hub id"
        )
