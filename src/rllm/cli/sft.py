"""`rllm sft`: fine-tune a model on conversations, or on the best of what an agent did before."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from rllm.cli.options import AsJson, Config, DryRun, Model, Resume, Settings, Split, ValSplit
from rllm.errors import ConfigError

if TYPE_CHECKING:
    from rllm.data.dataset import Dataset


def sft(
    data: Annotated[
        str | None,
        typer.Argument(
            help="Conversations: a file, the name of a registered dataset, or a hub id; or the folder of a run or an "
            "evaluation, or a .db file of traces. With --resume they are the run's own.",
            metavar="DATA",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    val: Annotated[
        str | None, typer.Option(help="Held-out conversations, for evaluation only; likewise.", show_default=False)
    ] = None,
    split: Split = None,
    val_split: ValSplit = None,
    model: Model = None,
    config: Config = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model on conversations: rows with `messages`, and with `tools` where they were offered.

    Rollouts of an earlier run or evaluation, and a gateway's sessions that were judged, are learned token for token;
    sft.reward_threshold and sft.best_per_task take the best of them.
    """
    from rllm.cli.resuming import begun_as, leading_setting
    from rllm.cli.training import announce, as_typed, carry_out, chosen_settings, losses, quiet_libraries

    started = time.perf_counter()
    data, settings = leading_setting(data, settings)
    given = {"data": data, "split": split, "val": val, "val_split": val_split}
    begun = begun_as("sft", given, resume=resume)
    if "data" not in begun:
        raise ConfigError(
            "DATA is missing: name a .jsonl file of conversations, a registered dataset, or a run's folder"
        )
    chosen = chosen_settings(settings, model=model, config=config, resume=resume)
    if not dry_run:
        announce(chosen.config)
    shown = _demonstrations(begun["data"], begun.get("split"), "DATA")
    held_out = _demonstrations(begun["val"], begun.get("val_split"), "--val") if "val" in begun else None
    quiet_libraries()  # which takes its time, as does what follows
    from rllm.config.loading import locating_errors
    from rllm.trainer.agent_sft_trainer import AgentSFTTrainer

    with as_typed(train_dataset="DATA", val_dataset="--val"), locating_errors(chosen.layers):
        trainer = AgentSFTTrainer(
            chosen.config,
            shown,
            held_out,
            resume=resume is not None,
        )
    carry_out(
        trainer,
        chosen,
        begun=begun,
        started=started,
        dry_run=dry_run,
        outcome=("loss", losses) if as_json else None,
    )


def _demonstrations(source: str, split: str | None, option: str) -> str | Dataset:
    """What a run or an evaluation left is read by the trainer; anything else here."""
    from rllm.cli.task_source import read_tasks
    from rllm.trainer.history import named_store

    return source if named_store(source) else read_tasks(source, split, option=option)
