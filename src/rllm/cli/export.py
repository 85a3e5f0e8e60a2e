"""`rllm export`: what a run leaves, for other programs and people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rllm.cli.options import Checkpoint

if TYPE_CHECKING:
    from rllm.types import Episode


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run; for --episodes and --chat also of an evaluation.")],
    episodes: Annotated[
        Path | None, typer.Option(help="Episodes, to a .jsonl or .parquet file.", show_default=False)
    ] = None,
    chat: Annotated[
        Path | None,
        typer.Option(help="Conversations as rllm sft and others read them, to a .jsonl file.", show_default=False),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The trained model, adapters merged, to a folder.", show_default=False)
    ] = None,
    adapter: Annotated[Path | None, typer.Option(help="Its LoRA adapter, to a folder.", show_default=False)] = None,
    html: Annotated[Path | None, typer.Option(help="A report, to one HTML file.", show_default=False)] = None,
    checkpoint: Checkpoint = "latest",
    split: Annotated[Literal["train", "eval", "all"], typer.Option(help="Which episodes.")] = "all",
    min_reward: Annotated[
        float | None, typer.Option(help="Only trajectories that earned at least this.", show_default=False)
    ] = None,
    rewards: Annotated[
        Path | None, typer.Option(help="Rewards of rllm rescore, in place of the old.", show_default=False)
    ] = None,
) -> None:
    """Write a run's model, its episodes, conversations to learn from, or a report; several at once."""
    from rllm.errors import ConfigError, counted
    from rllm.trainer.export import chosen_checkpoint, export_adapter, export_chat, export_episodes, export_model

    if not any((episodes, chat, model, adapter, html)):
        raise ConfigError("nothing to write: give --episodes, --chat, --model, --adapter or --html")
    if not (episodes or chat):
        chosen = {"--split": None if split == "all" else split, "--min-reward": min_reward, "--rewards": rewards}
        if unused := next((f"{option} {value}" for option, value in chosen.items() if value is not None), None):
            raise ConfigError(
                f"{unused} would have no effect: it is for --episodes and --chat; give one, or leave it out"
            )
    if checkpoint != "latest" and not (model or adapter):
        raise ConfigError(
            f"--checkpoint {checkpoint} would have no effect: it is for --model and --adapter; give one, or leave it out"
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
    from rllm.trainer.history import stored_episodes
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
