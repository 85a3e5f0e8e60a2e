"""`rllm explain`: what an episode was trained with."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rllm.cli import terminal
from rllm.cli.options import OnlyJson

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.store.base import TraceStore
    from rllm.trainer.explain import ExplainedEpisode, ExplainedStep, ListedEpisode


def explain(
    run: Annotated[Path, typer.Argument(help="Folder of a run or an evaluation, or a traces.db.")],
    episode: Annotated[
        str | None,
        typer.Argument(
            help="Episode, as the list names it without this: 3:0 is the first rollout of task 3 in an evaluation, 3@0.0.0:0 one "
            "in a training step. Or the id of its session.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show every sampled token, too.")] = False,
    split: Annotated[
        Literal["train", "eval"] | None, typer.Option(help="List episodes of this split only.", show_default=False)
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            help="List episodes of this training step, and of the evaluation behind it, only.",
            min=0,
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="How many episodes to list, the newest ones.", min=1)] = 20,
    as_json: OnlyJson = False,
) -> None:
    """Show reward, group, baseline, advantage and weight version of every step of an episode; or list the episodes.

    Steps are in the order of their calls; a step that was not trained on says why.
    """
    from rllm.trainer.explain import explain as read
    from rllm.trainer.explain import latest_episodes

    with _store_of(run) as store:
        listed = [] if episode else latest_episodes(store, limit=limit, split=split, step=step)
        found = read(store, episode) if episode else None
    if as_json:
        told = {"episodes": [item.to_dict() for item in listed]} if found is None else found.to_dict()
        terminal.print_json(told)
    elif found is None:
        _list(terminal.console(wide=True), run, listed, limit=limit, chosen=split is not None or step is not None)
    else:
        _show(terminal.console(wide=True), found, tokens=tokens)


def _store_of(run: Path) -> TraceStore:
    from rllm.store import open_store
    from rllm.trainer.history import store_of

    return open_store(str(run) if run.is_file() else store_of(run), read_only=True)


def _list(console: Console, run: Path, episodes: Sequence[ListedEpisode], *, limit: int, chosen: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not episodes:
        which = "such episodes; without --split and --step all are listed" if chosen else "episodes yet"
        console.print(f"{run} has no {which}.", soft_wrap=True, markup=False)
        return
    table = Table("episode", "split", "step", "reward")
    for item in episodes:
        step = "" if item.step is None else str(item.step)
        table.add_row(escape(item.episode_id), item.split, step, escape(_ending(item)))
    console.print(table)
    one = next((item for item in episodes if item.split == "train"), episodes[0])
    again = f"{terminal.command()} {shlex.join(['explain', str(run), one.episode_id])}"
    others = "; --limit, --split and --step list others" if len(episodes) == limit else ""
    console.print(f"The newest {len(episodes)}{others}. Explain one with: {again}", soft_wrap=True, markup=False)


def _ending(episode: ListedEpisode) -> str:
    if episode.error is not None:
        return f"failed: {episode.error}"
    rewards = {name: "unscored" if reward is None else _number(reward) for name, reward in episode.rewards.items()}
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    return ", ".join(f"{name} {reward}" for name, reward in rewards.items())


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
    if episode.error is not None:
        failed = f"failed: {episode.error['type']}: {episode.error['message']}\n{episode.error['traceback']}"
        console.print(failed.rstrip(), soft_wrap=True, markup=False, highlight=False)
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
