"""`rllm rescore`: what another reward would have given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rllm.cli.options import AsJson, Split, ValSplit
from rllm.errors import counted, number

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.trainer.rescore import Comparison

_MAX_ANSWER = 60
_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""Without them a client cannot be made, and agents that share a file with their reward make theirs as it is imported."""


def rescore(
    run: Annotated[Path, typer.Argument(help="Folder of a run or an evaluation.")],
    reward: Annotated[
        str, typer.Option(help="Called with each task and the last answer's text.", metavar="FILE.py:function")
    ],
    data: Annotated[
        str | None,
        typer.Option(help="The run's training tasks, where its folder has lost its tasks.jsonl.", show_default=False),
    ] = None,
    val: Annotated[str | None, typer.Option(help="Its held-out tasks, likewise.", show_default=False)] = None,
    split: Split = None,
    val_split: ValSplit = None,
    top: Annotated[int, typer.Option(help="How many of the largest changes to show.", min=0)] = 10,
    max_concurrent: Annotated[int, typer.Option(help="Rewards computed at a time.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Compute new rewards over the stored episodes of a run or an evaluation, and show what they change.

    They are written to a file of their own beside the old ones, which stay; `rllm export --rewards` takes it.
    """
    from rich.progress import Progress, TextColumn

    from rllm.cli import terminal
    from rllm.cli.agent_file import load_function
    from rllm.errors import ConfigError, RewardError, all_of
    from rllm.rewards.scoring import check_reward
    from rllm.trainer.history import stored_episodes
    from rllm.trainer.rescore import compare, write_rewards
    from rllm.trainer.rescore import rescore as judged

    for name in _KEYS:
        os.environ.setdefault(name, "unused")
    function = load_function(reward, what="reward")
    check_reward(function)
    tasks = {**_tasks("train", data, split, "--data"), **_tasks("eval", val, val_split, "--val")}
    console = terminal.console(stderr=as_json)
    columns = TextColumn("scoring {task.completed}")
    with Progress(columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task("scoring", total=None)
        found = list(
            judged(
                stored_episodes(run, tasks),
                function,
                max_concurrent=max_concurrent,
                on_done=lambda count: bar.update(task, completed=count),
            )
        )
    if not found:
        raise ConfigError(f"run={str(run)!r} has no episodes that ended without failing")
    path = write_rewards(run, reward.rpartition(":")[2], found)
    comparison = compare(found, num_largest=top)
    _show(console, comparison)
    console.print(f"New rewards: {path}", soft_wrap=True, markup=False)
    if as_json:
        terminal.print_json({**comparison.to_dict(), "file": str(path)})
    if comparison.num_failed == comparison.num_trajectories:
        raise RewardError(
            f"{reward} raised for {all_of(comparison.num_failed, 'trajectory', 'trajectories')}: {found[0].error}"
        )


def _tasks(split: str, source: str | None, part: str | None, option: str) -> dict[tuple[str, str], Any]:
    """The tasks of a run by the name of its split, where these are found, and their own ids."""
    from rllm.cli.task_source import read_tasks
    from rllm.errors import ConfigError

    if source is None:
        if part is not None:
            raise ConfigError(f"{option} is missing: a part of it, {part!r}, is named")
        return {}
    rows = read_tasks(source, part, option=option)
    return {(split, rows.task_id(number)): task for number, task in enumerate(rows)}


def _show(console: Console, told: Comparison) -> None:
    from rich.markup import escape
    from rich.table import Table

    console.print(
        f"{told.num_changed} of {told.num_trajectories} rewards change; the mean was {_number(told.mean_before)} and is "
        f"{_number(told.mean_after)}"
    )
    if told.num_failed:
        console.print(f"[yellow]{counted(told.num_failed, 'reward')} raised and left unscored; the file says why[/]")
    if not told.largest:
        return
    table = Table("episode", "role", "before", "after", "answer", title="largest changes", title_justify="left")
    for item in told.largest:
        said = "".join(letter if letter.isprintable() else " " for letter in item.error or item.answer)
        short = said if len(said) <= _MAX_ANSWER else f"{said[:_MAX_ANSWER]} ..."
        table.add_row(
            escape(item.episode_id), escape(item.name), _number(item.before), _number(item.after), escape(short)
        )
    console.print(table)


def _number(value: float | None) -> str:
    return "unscored" if value is None else number(value, digits=4)
