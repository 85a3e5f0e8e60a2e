"""`rllm explain`: what an episode was trained with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rllm.cli.options import OnlyJson

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.trainer.explain import ExplainedEpisode, ExplainedStep


def explain(
    run: Annotated[Path, typer.Argument(help="Run folder, or a traces.db.")],
    episode: Annotated[str, typer.Argument(help="Episode: TASK_ID:INDEX, or the id of its session.")],
    tokens: Annotated[bool, typer.Option("--tokens", help="Also every sampled token.")] = False,
    as_json: OnlyJson = False,
) -> None:
    """Show reward, group, baseline, advantage and weight version of every step of an episode.

    Steps are in the order of their calls; a step that was not trained on says why.
    """
    from rllm.cli import terminal
    from rllm.errors import ConfigError
    from rllm.store import open_store
    from rllm.trainer.explain import explain as read

    path = run / "traces.db" if run.is_dir() else run
    if not path.is_file():
        raise ConfigError(f"run={str(run)!r} has no traces.db: name the folder of a run")
    store = open_store(str(path), read_only=True)
    try:
        found = read(store, episode)
    finally:
        store.close()
    if as_json:
        terminal.print_json(found.to_dict())
        return
    _show(terminal.console(wide=True), found, tokens=tokens)


def _show(console: Console, episode: ExplainedEpisode, *, tokens: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    console.print(f"[bold]{escape(episode.episode_id)}[/], session {episode.session_id}, {episode.split}")
    table = Table("call", "role", "reward", "group", "baseline", "advantage", "tokens", "version", "learned from")
    for number, step in enumerate(episode.steps):
        learned = "yes" if step.num_trained_tokens else step.dropped or "no: nobody trained on it"
        table.add_row(
            str(number),
            escape(step.role),
            _number(step.reward),
            escape(step.group_id or ""),
            _number(step.baseline),
            _number(step.advantage),
            f"{step.num_prompt_tokens} + {len(step.tokens)}",
            "" if step.weight_version is None else str(step.weight_version),
            learned,
        )
    console.print(table)
    trained = sum(step.num_trained_tokens for step in episode.steps)
    console.print(f"{trained} tokens in the batch, their advantages sum to {sum(_sums(episode)):.6g}")
    if tokens:
        for number, step in enumerate(episode.steps):
            _show_tokens(console, number, step)


def _show_tokens(console: Console, number: int, step: ExplainedStep) -> None:
    from rich.table import Table

    table = Table("position", "id", "sampler logprob", "trainer logprob", "ratio", "advantage", title=f"call {number}")
    for token in step.tokens:
        trained = token.trainer_logprob is not None
        ratio = math.exp(token.trainer_logprob - token.sampler_logprob) if token.trainer_logprob is not None else None
        table.add_row(
            str(token.position),
            str(token.token_id),
            f"{token.sampler_logprob:.5f}",
            f"{token.trainer_logprob:.5f}" if trained else "",
            _number(ratio),
            _number(token.advantage) if trained else "",
        )
    console.print(table)


def _sums(episode: ExplainedEpisode) -> list[float]:
    return [step.advantage_sum for step in episode.steps]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
