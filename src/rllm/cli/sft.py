"""`rllm sft`: fine-tune a model on conversations, or on the best of what an agent did before."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from rllm.cli.options import AsJson, Config, DryRun, Model, Resume, Settings, Split, ValSplit


def sft(
    data: Annotated[
        str,
        typer.Argument(
            help="Conversations: a file, the name of a registered dataset, or a hub id; or the folder of a run or an evaluation.",
            metavar="DATA",
        ),
    ],
    settings: Settings = None,
    val: Annotated[str | None, typer.Option(help="Held-out ones, likewise.", show_default=False)] = None,
    split: Split = None,
    val_split: ValSplit = None,
    model: Model = None,
    config: Config = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model on conversations: rows with `messages`, and with `tools` where they were offered.

    Rollouts of an earlier run or evaluation are learned token for token; sft.reward_threshold and sft.best_per_task take the
    best of them.
    """
    from rllm.cli.task_source import read_tasks
    from rllm.cli.training import carry_out, chosen_settings, losses, options, quiet_libraries

    started = time.perf_counter()
    chosen = chosen_settings(settings, model=model, config=config, resume=resume)
    quiet_libraries()
    from rllm.trainer.agent_sft_trainer import AgentSFTTrainer, store_of

    trainer = AgentSFTTrainer(
        chosen.config,
        data if store_of(data) else read_tasks(data, split, option="--split"),
        None if val is None else val if store_of(val) else read_tasks(val, val_split, option="--val-split"),
        resume=resume is not None,
    )
    carry_out(
        trainer,
        chosen,
        again=["sft", data, *options({"--split": split, "--val": val, "--val-split": val_split})],
        started=started,
        dry_run=dry_run,
        outcome=("loss", losses) if as_json else None,
    )
