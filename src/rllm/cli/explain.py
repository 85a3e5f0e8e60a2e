"""`rllm explain`: reward, group, baseline and advantage of an episode."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rllm.cli import terminal
from rllm.cli.options import OnlyJson, known_split
from rllm.errors import number

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.trainer.explain import ExplainedEpisode, ExplainedStep, ListedEpisode


def explain(
    run: Annotated[Path, typer.Argument(help="Folder of a run or an evaluation, or a traces.db.")],
    episode: Annotated[
        str | None,
        typer.Argument(
            help="Episode id, from the list shown without one: 3:0 is the first rollout of task 3 in an evaluation, "
            "3@0.0.0:0 one in a training step. Or the id of its session.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also show every sampled token.")] = False,
    split: Annotated[
        str | None,
        typer.Option(
            help="Only episodes of this split.", metavar="<train|eval>", show_default=False, callback=known_split
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            help="Only episodes of this training step, and of the evaluation after it.",
            min=0,
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of newest episodes to list.", min=1)] = 20,
    as_json: OnlyJson = False,
) -> None:
    """Show reward, group, baseline, advantage and weight version of every step of an episode; or list the episodes.

    Steps are in the order of their calls; a step that was not trained on has a reason.
    """
    from rllm.store import open_store
    from rllm.tracking.about import run_id_of
    from rllm.trainer.episode_records import store_of
    from rllm.trainer.explain import explain as read
    from rllm.trainer.explain import latest_episodes
    from rllm.viewer.batches import advantages_in

    url, run_id = (str(run), None) if run.is_file() else (store_of(run), run_id_of(run))
    with open_store(url, read_only=True) as store:
        listed = [] if episode else latest_episodes(store, limit=limit, split=split, step=step, run_id=run_id)
        fed = advantages_in(run.parent if run.is_file() else run)
        found = read(store, episode, split=split, step=step, run_id=run_id, fed=fed) if episode else None
    if as_json:
        values = {"episodes": [item.to_dict() for item in listed]} if found is None else found.to_dict()
        terminal.print_json(values)
    elif found is None:
        _list(terminal.console(wide=True), run, listed, limit=limit, chosen=split is not None or step is not None)
    else:
        _show(terminal.console(wide=True), found, store=url, tokens=tokens)


def _list(console: Console, run: Path, episodes: Sequence[ListedEpisode], *, limit: int, chosen: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not episodes:
        which = "such episodes; without --split and --step all are listed" if chosen else "episodes yet"
        if run.is_file() and not chosen:
            which += f"; {terminal.command()} {shlex.join(['traces', 'list', '--store', str(run)])} lists other calls"
        console.print(f"{run} has no {which}.", soft_wrap=True, markup=False)
        return
    table = Table("episode", "split", "step", "reward")
    for item in episodes:
        step = "" if item.step is None else str(item.step)
        table.add_row(escape(item.episode_id), item.split, step, escape(_ending(item)))
    console.print(table)
    one = next((item for item in episodes if item.split == "train"), episodes[0])
    of_step = [] if one.split != "eval" or one.step is None else ["--step", str(one.step)]
    again = f"{terminal.command()} {shlex.join(['explain', str(run), one.episode_id, *of_step])}"
    others = "; --limit, --split and --step list others" if len(episodes) == limit else ""
    console.print(f"The newest {len(episodes)}{others}. Explain one with: {again}", soft_wrap=True, markup=False)


def _ending(episode: ListedEpisode) -> str:
    if episode.error is not None:
        return f"failed: {episode.error}"
    return _earned(episode.rewards)


def _earned(rewards: Mapping[str, float | None]) -> str:
    shown = {name: "unscored" if reward is None else _number(reward) for name, reward in rewards.items()}
    if len(shown) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{name} {reward}" for name, reward in shown.items())


def _show(console: Console, episode: ExplainedEpisode, *, store: str, tokens: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    facts = [f"session {episode.session_id}", episode.split]
    facts += [] if episode.step is None else [f"step {episode.step}"]
    facts += [f"reward {_earned(episode.rewards)}"] if episode.rewards else []
    console.print(f"[bold]{escape(episode.episode_id)}[/], {escape(', '.join(filter(None, facts)))}", soft_wrap=True)
    table = Table("call", "role", "reward", "group", "baseline", "advantage", "tokens", "version", "learned from")
    for place, step in enumerate(episode.steps):
        table.add_row(
            str(place),
            escape(step.role),
            _number(step.reward),
            escape(step.group_id or ""),
            _number(step.baseline),
            _number(step.advantage),
            f"{step.num_prompt_tokens} + {len(step.tokens)}",
            "" if step.weight_version is None else str(step.weight_version),
            _learned(step),
        )
    console.print(table)
    trained = sum(step.num_trained_tokens for step in episode.steps)
    if trained:
        console.print(f"{trained} tokens in the batch, their advantages sum to {number(sum(_sums(episode)), digits=6)}")
    if episode.error is not None:
        failed = f"failed: {episode.error['type']}: {episode.error['message']}\n{episode.error['traceback']}"
        console.print(failed.rstrip(), soft_wrap=True, markup=False, highlight=False)
    if episode.steps:
        look = shlex.join(["traces", "show", episode.session_id, "--store", store])
        console.print(f"Messages: {terminal.command()} {look}", soft_wrap=True, markup=False)
    if tokens:
        for place, call in enumerate(episode.steps):
            _show_tokens(console, place, call)


def _learned(step: ExplainedStep) -> str:
    """Return `yes` if a step was trained on, otherwise the reason."""
    if step.num_trained_tokens:
        return "yes"
    if step.side_call:
        return f"no: a side call ({step.side_call}), whose answer is in no later message"
    return step.dropped or ("no: it was not trained on" if step.training_step is None else "no: its advantage is 0")


def _show_tokens(console: Console, place: int, step: ExplainedStep) -> None:
    from rich.table import Table

    heads = ("position", "id", "version", "sampler logprob", "trainer logprob", "ratio", "advantage")
    table = Table(*heads, title=f"call {place}")
    for token in step.tokens:
        trained = token.trainer_logprob is not None
        ratio = math.exp(token.trainer_logprob - token.sampler_logprob) if token.trainer_logprob is not None else None
        table.add_row(
            str(token.position),
            str(token.token_id),
            "" if token.weight_version is None else str(token.weight_version),
            f"{token.sampler_logprob:.5f}",
            f"{token.trainer_logprob:.5f}" if trained else "",
            _number(ratio),
            _number(token.advantage) if trained else "",
        )
    console.print(table)


def _sums(episode: ExplainedEpisode) -> list[float]:
    return [step.advantage_sum for step in episode.steps]


def _number(value: float | None) -> str:
    return number(value, digits=4)
