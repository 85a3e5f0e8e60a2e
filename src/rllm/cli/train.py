"""`rllm train`: train the policy behind any agent function."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from rllm.cli.options import (
    Agent,
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


def train(
    agent: Agent,
    settings: Settings = None,
    reward: Reward = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Tasks to learn from: a file, the name of a registered dataset, or a hub id.", show_default=False
        ),
    ] = None,
    val: Annotated[str | None, typer.Option(help="Held-out tasks, likewise.", show_default=False)] = None,
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
    is set for it.
    """
    from rllm.cli.agent_file import load_agent
    from rllm.cli.task_source import read_tasks
    from rllm.cli.training import accuracies, carry_out, chosen_settings, lead_to_gateway, options, quiet_libraries
    from rllm.errors import ConfigError

    started = time.perf_counter()
    if data is None:
        raise ConfigError(
            "--data is missing: name a .jsonl file with one task a line, a registered dataset, or a hub id"
        )
    chosen = chosen_settings(
        settings, model=model, config=config, resume=resume, backend=backend, ray_address=ray_address
    )
    port = lead_to_gateway(chosen.config)
    function = load_agent(agent, reward)
    quiet_libraries()
    from rllm.trainer.agent_trainer import AgentTrainer

    trainer = AgentTrainer(
        agent_run_func=function,
        train_dataset=read_tasks(data, split, option="--split"),
        val_dataset=None if val is None else read_tasks(val, val_split, option="--val-split"),
        config=chosen.config,
        resume=resume is not None,
    )
    again = options({"--reward": reward, "--data": data, "--split": split, "--val": val, "--val-split": val_split})
    carry_out(
        trainer,
        chosen,
        again=["train", agent, *again],
        started=started,
        dry_run=dry_run,
        port=port,
        outcome=("accuracy", accuracies) if as_json else None,
    )
