"""`rllm export` and `rllm rescore`: stored episodes for other programs, and their rewards by another function."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rllm.cli.options import AsJson, Checkpoint, Split, ValSplit
from rllm.errors import counted, number

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.trainer.rescore import Comparison
    from rllm.types import Episode


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run; with --episodes and --chat also of an evaluation.")],
    episodes: Annotated[
        Path | None, typer.Option(help="Episodes, to a .jsonl or .parquet file.", show_default=False)
    ] = None,
    chat: Annotated[
        Path | None,
        typer.Option(help="Conversations for rllm sft and other trainers, to a .jsonl file.", show_default=False),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Trained model, with adapters merged, to a folder.", show_default=False)
    ] = None,
    adapter: Annotated[Path | None, typer.Option(help="LoRA adapter, to a folder.", show_default=False)] = None,
    html: Annotated[Path | None, typer.Option(help="Report, as one HTML file.", show_default=False)] = None,
    checkpoint: Checkpoint = "latest",
    split: Annotated[Literal["train", "eval", "all"], typer.Option(help="Split of the episodes.")] = "all",
    min_reward: Annotated[
        float | None, typer.Option(help="Only trajectories with at least this reward.", show_default=False)
    ] = None,
    rewards: Annotated[
        Path | None, typer.Option(help="File of rllm rescore with rewards to use instead.", show_default=False)
    ] = None,
) -> None:
    """Write a run's model, episodes, conversations to train on, or a report; several at once."""
    from rllm.errors import ConfigError
    from rllm.trainer.export import chosen_checkpoint, export_adapter, export_chat, export_episodes, export_model

    if not any((episodes, chat, model, adapter, html)):
        raise ConfigError("nothing to write: give --episodes, --chat, --model, --adapter or --html")
    if not (episodes or chat):
        chosen = {"--split": None if split == "all" else split, "--min-reward": min_reward, "--rewards": rewards}
        if unused := next((f"{option} {value}" for option, value in chosen.items() if value is not None), None):
            raise ConfigError(
                f"{unused} would have no effect: it needs --episodes or --chat; give one, or leave it out"
            )
    if checkpoint != "latest" and not (model or adapter):
        raise ConfigError(
            f"--checkpoint {checkpoint} would have no effect: it needs --model or --adapter; give one, or leave it out"
        )
    if episodes is not None:
        count = export_episodes(_chosen(run, split, min_reward, rewards), episodes)
        rows = ("trajectory", "trajectories") if episodes.suffix == ".parquet" else ("episode",)
        print(f"{counted(count, *rows)} written to {episodes}")
    if chat is not None:
        count = export_chat(_chosen(run, split, min_reward, rewards), chat)
        print(f"{counted(count, 'conversation')} written to {chat}")
    if model is not None:
        export_model(chosen_checkpoint(run, checkpoint), model)
        print(f"model written to {model}")
    if adapter is not None:
        export_adapter(chosen_checkpoint(run, checkpoint), adapter)
        print(f"adapter written to {adapter}")
    if html is not None:
        from rllm.viewer.export import export_report

        count = export_report(str(run), html)
        print(f"report with {counted(count, 'rollout')} in full written to {html}")


def _chosen(run: Path, split: str, min_reward: float | None, rewards: Path | None) -> Iterator[Episode]:
    from rllm.trainer.episode_records import stored_episodes
    from rllm.trainer.rescore import with_rewards

    found = stored_episodes(run)
    for episode in found if rewards is None else with_rewards(found, rewards):
        if split not in ("all", episode.info.get("split")):
            continue
        if min_reward is not None:
            paid = [path for path in episode.trajectories if (path.final_reward() or 0.0) >= min_reward]
            episode.trajectories = [path for path in paid if path.final_reward() is not None]
        if episode.trajectories or min_reward is None:
            yield episode


_MAX_ANSWER = 60
_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""Keys without which a client cannot be constructed, as by an agent in the same file as the reward."""


def rescore(
    run: Annotated[Path, typer.Argument(help="Folder of a run or an evaluation.")],
    reward: Annotated[
        str,
        typer.Option(
            help="Reward function, called with each task and the last answer's text.", metavar="FILE.py:function"
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Training tasks of the run, if its folder has no tasks.jsonl.", show_default=False),
    ] = None,
    val: Annotated[
        str | None,
        typer.Option(
            help="Held-out tasks of the run, if its folder has no tasks.jsonl.",
            show_default=False,
        ),
    ] = None,
    split: Split = None,
    val_split: ValSplit = None,
    top: Annotated[int, typer.Option(help="Number of largest changes to show.", min=0)] = 10,
    max_concurrent: Annotated[int, typer.Option(help="Rewards computed at a time.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Compute new rewards for the stored episodes of a run or an evaluation, and show the changes.

    They are written to a new file beside the old ones; `rllm export --rewards` reads it.
    """
    from rich.progress import Progress, TextColumn

    from rllm.cli import terminal
    from rllm.cli.inputs import load_function
    from rllm.errors import ConfigError, RewardError, all_of
    from rllm.rewards.scoring import check_reward
    from rllm.trainer.episode_records import stored_episodes
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
        raise ConfigError(f"run={str(run)!r} has no episodes that did not fail")
    path = write_rewards(run, reward.rpartition(":")[2], found)
    comparison = compare(found, num_largest=top)
    _show_comparison(console, comparison)
    console.print(f"New rewards: {path}", soft_wrap=True, markup=False)
    if as_json:
        terminal.print_json({**comparison.to_dict(), "file": str(path)})
    if comparison.num_failed == comparison.num_trajectories:
        raise RewardError(
            f"{reward} raised for {all_of(comparison.num_failed, 'trajectory', 'trajectories')}: {found[0].error}"
        )


def _tasks(split: str, source: str | None, part: str | None, option: str) -> dict[tuple[str, str], Any]:
    """Return the tasks of a run by split and task id."""
    from rllm.cli.inputs import read_tasks
    from rllm.errors import ConfigError

    if source is None:
        if part is not None:
            raise ConfigError(f"{option} is missing: its split {part!r} is given")
        return {}
    rows = read_tasks(source, part, option=option)
    return {(split, rows.task_id(number)): task for number, task in enumerate(rows)}


def _show_comparison(console: Console, found: Comparison) -> None:
    from rich.markup import escape
    from rich.table import Table

    console.print(
        f"{found.num_changed} of {found.num_trajectories} rewards change; the mean was {_number(found.mean_before)} "
        f"and is {_number(found.mean_after)}"
    )
    if found.num_failed:
        console.print(f"[yellow]{counted(found.num_failed, 'reward')} raised: unscored, with reasons in the file[/]")
    if not found.largest:
        return
    table = Table("episode", "role", "before", "after", "answer", title="largest changes", title_justify="left")
    for item in found.largest:
        text = "".join(letter if letter.isprintable() else " " for letter in item.error or item.answer)
        short = text if len(text) <= _MAX_ANSWER else f"{text[:_MAX_ANSWER]} ..."
        table.add_row(
            escape(item.episode_id), escape(item.name), _number(item.before), _number(item.after), escape(short)
        )
    console.print(table)


def _number(value: float | None) -> str:
    return "unscored" if value is None else number(value, digits=4)
