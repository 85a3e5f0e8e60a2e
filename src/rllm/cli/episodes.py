"""`rllm explain`, `rllm export` and `rllm rescore`: explain, write and score stored episodes."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rllm.cli import terminal
from rllm.cli.options import AsJson, OnlyJson, Split, ValSplit, optional
from rllm.errors import ConfigError, RewardError, all_of, counted, number

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.trainer.rescore import Comparison
    from rllm.types import Episode, Task
    from rllm.viewer.explain import ExplainedEpisode, ExplainedStep, ListedEpisode
    from rllm.viewer.texts import Vocabulary


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
    split: Annotated[Literal["train", "eval"] | None, optional("Only episodes of this split.")] = None,
    step: Annotated[
        int | None, optional("Only episodes of this training step, and of the evaluation after it.", min=0)
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of newest episodes to list.", min=1)] = 20,
    as_json: OnlyJson = False,
) -> None:
    """Show reward, group, baseline, advantage and weight version of every step of an episode; or list the episodes.

    Steps are in the order of their calls; a step that was not trained on has a reason. For an episode of an evaluation,
    calls are shown with their answers.
    """
    from rllm.store import open_store
    from rllm.tracking.about import run_id_of
    from rllm.trainer.episode_records import store_of
    from rllm.viewer.batches import advantages_in
    from rllm.viewer.explain import explain as read
    from rllm.viewer.explain import latest_episodes
    from rllm.viewer.runs import Run

    url, run_id = (str(run), None) if run.is_file() else (store_of(run), run_id_of(run))
    with open_store(url, read_only=True) as store:
        if episode is None:
            listed = latest_episodes(store, limit=limit, split=split, step=step, run_id=run_id)
            if as_json:
                terminal.print_json({"episodes": [item.to_dict() for item in listed]})
            else:
                _list(run, listed, limit=limit, chosen=split is not None or step is not None)
            return
        fed = advantages_in(run.parent if run.is_file() else run)
        found = read(store, episode, split=split, step=step, run_id=run_id, fed=fed)
    if as_json:
        terminal.print_json(found.to_dict())
    else:
        console = terminal.console(wide=True)
        _show(console, found, store=url)
        if tokens:
            vocabulary = Run(run.name, folder=run if run.is_dir() else None).vocabulary
            for place, call in enumerate(found.steps):
                _show_tokens(console, place, call, vocabulary, is_of_training=found.is_of_training)


def _list(run: Path, episodes: Sequence[ListedEpisode], *, limit: int, chosen: bool) -> None:
    console = terminal.console(wide=True)
    if not episodes:
        which = "such episodes; without --split and --step all are listed" if chosen else "episodes yet"
        if run.is_file() and not chosen:
            which += f"; rllm {shlex.join(['traces', 'list', '--store', str(run)])} lists other calls"
        console.print(f"{run} has no {which}.", soft_wrap=True, markup=False)
        return
    has_steps = any(item.step is not None for item in episodes)  # an evaluation has none
    rows = []
    for item in episodes:
        ending = _rewards(item.rewards) if item.error is None else f"failed: {item.error['type']}"
        place = [item.split, "" if item.step is None else item.step] if has_steps else []
        rows.append([item.episode_id, *place, ending])
    terminal.print_table(["episode", *(["split", "step"] if has_steps else []), "reward"], rows, on=console)
    one = next((item for item in episodes if item.split == "train"), episodes[0])
    of_step = [] if one.split != "eval" or one.step is None else ["--step", str(one.step)]
    again = f"rllm {shlex.join(['explain', str(run), one.episode_id, *of_step])}"
    others = "; --limit, --split and --step list others" if len(episodes) == limit else ""
    console.print(f"The newest {len(episodes)}{others}. Explain one with: {again}", soft_wrap=True, markup=False)


def _rewards(rewards: Mapping[str, float | None]) -> str:
    shown = {name: "unscored" if reward is None else number(reward, digits=4) for name, reward in rewards.items()}
    if len(shown) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{name} {reward}" for name, reward in shown.items())


def _show(console: Console, episode: ExplainedEpisode, *, store: str) -> None:
    from rich.text import Text

    from rllm._runtime.untrusted import shown

    facts = [f"session {episode.session_id}", episode.split]
    facts += [] if episode.step is None else [f"step {episode.step}"]
    facts += [f"reward {_rewards(episode.rewards)}"] if episode.rewards else []
    console.print(Text.assemble((episode.episode_id, "bold"), ", ", ", ".join(filter(None, facts))), soft_wrap=True)
    for role in {**episode.reward_parts, **episode.verdicts}:
        named = {name: number(value, digits=4) for name, value in episode.reward_parts.get(role, {}).items()}
        for name, value in {**named, **episode.verdicts.get(role, {})}.items():
            text = str(value).strip("\n").replace("\n", "\n    ")
            separator = "\n    " if "\n" in text else " "  # longer texts, such as a diff, have lines of their own
            console.print(Text(shown(f"  {role}, {name}:{separator}{text}")), soft_wrap=True)
    (_print_credits if episode.is_of_training else _print_calls)(console, episode)
    if trained := sum(step.num_trained_tokens for step in episode.steps):
        total = sum(step.advantage_sum for step in episode.steps)
        console.print(f"{trained} tokens in the batch, their advantages sum to {number(total, digits=6)}")
    if episode.error is not None:
        failed = f"failed: {episode.error['type']}: {episode.error['message']}\n{episode.error['traceback']}"
        console.print(failed.rstrip(), soft_wrap=True, markup=False, highlight=False)
    if episode.steps:
        look = shlex.join(["traces", "show", episode.session_id, "--store", store])
        console.print(f"Messages: rllm {look}", soft_wrap=True, markup=False)


def _print_credits(console: Console, episode: ExplainedEpisode) -> None:
    """Print the credit of each call."""
    heads = ["call", "role", "reward", "group", "baseline", "advantage", "tokens", "version", "learned from"]
    rows = [
        (
            place,
            step.role,
            number(step.reward, digits=4),
            step.group_id or "",
            number(step.baseline, digits=4),
            number(step.advantage, digits=4),
            f"{step.num_prompt_tokens} + {len(step.tokens)}",
            _version(step.weight_version),
            _learned(step),
        )
        for place, step in enumerate(episode.steps)
    ]
    terminal.print_table(heads, rows, on=console)


def _print_calls(console: Console, episode: ExplainedEpisode) -> None:
    """Print the calls of an episode that was not trained on, such as one of an evaluation."""
    from rllm.tracking.samples import message_text

    rows = []
    for place, step in enumerate(episode.steps):
        answer = f"a side call ({step.side_call}): " if step.side_call else ""
        answer += _printable(message_text(step.answer))
        rows.append((place, f"{step.num_prompt_tokens} + {len(step.tokens)}", _version(step.weight_version), answer))
    terminal.print_table(["call", "tokens", "version", "answer"], rows, on=console)


def _version(version: int | None) -> str:
    return "" if version is None else str(version)


def _learned(step: ExplainedStep) -> str:
    """Return `yes` if a step was trained on, otherwise the reason."""
    from rllm.types import why_left_out

    if step.num_trained_tokens:
        return "yes"
    if step.side_call:
        return f"no: a side call ({step.side_call}), whose answer is in no later message"
    if step.dropped:
        return f"no: {why_left_out(step.dropped)}"
    return "no: it was not trained on" if step.training_step is None else "no: its advantage is 0"


def _show_tokens(
    console: Console, place: int, step: ExplainedStep, vocabulary: Vocabulary, *, is_of_training: bool
) -> None:
    from rllm.viewer.texts import one_line

    heads = ["position", "id", *(["text"] if vocabulary else []), "version", "sampler logprob"]
    heads += ["trainer logprob", "ratio", "advantage"] if is_of_training else []
    rows = []
    for token in step.tokens:
        trained = ["", "", ""] if is_of_training else []
        if token.trainer_logprob is not None:
            ratio = math.exp(token.trainer_logprob - token.sampler_logprob)
            trained = [f"{token.trainer_logprob:.5f}", number(ratio, digits=4), number(token.advantage, digits=4)]
        text = [one_line(vocabulary.text_of(token.token_id))] if vocabulary else []
        known = [_version(token.weight_version), f"{token.sampler_logprob:.5f}"]
        rows.append([token.position, token.token_id, *text, *known, *trained])
    terminal.print_table(heads, rows, title=f"call {place}", on=console)


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run; with --episodes and --chat also of an evaluation.")],
    episodes: Annotated[Path | None, optional("Episodes, to a .jsonl file.")] = None,
    chat: Annotated[Path | None, optional("Conversations for rllm sft and other trainers, to a .jsonl file.")] = None,
    model: Annotated[Path | None, optional("Trained model, with adapters merged, to a folder.")] = None,
    adapter: Annotated[Path | None, optional("LoRA adapter, to a folder.")] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Checkpoint of the run: latest, best, or a name such as step-000020.")
    ] = "latest",
    split: Annotated[Literal["train", "eval", "all"], typer.Option(help="Split of the episodes.")] = "all",
    min_reward: Annotated[float | None, optional("Only trajectories with at least this reward.")] = None,
    rewards: Annotated[Path | None, optional("File of rllm rescore with rewards to use instead.")] = None,
) -> None:
    """Write a run's model, episodes, or conversations to train on; several at once. A report: `rllm view --export`."""
    from rllm.trainer.export import chosen_checkpoint, export_adapter, export_chat, export_episodes, export_model

    if not any((episodes, chat, model, adapter)):
        raise ConfigError("nothing to write: give --episodes, --chat, --model or --adapter")
    needed = {
        "--split": (split, "all", "--episodes or --chat", episodes or chat),
        "--min-reward": (min_reward, None, "--episodes or --chat", episodes or chat),
        "--rewards": (rewards, None, "--episodes or --chat", episodes or chat),
        "--checkpoint": (checkpoint, "latest", "--model or --adapter", model or adapter),
    }
    for option, (value, default, others, given) in needed.items():
        if value != default and not given:
            raise ConfigError(f"{option} {value} would have no effect: it needs {others}; give one, or leave it out")
    if episodes is not None:
        count = export_episodes(_chosen(run, split, min_reward, rewards), episodes)
        print(f"{counted(count, 'episode')} written to {episodes}")
    if chat is not None:
        count = export_chat(_chosen(run, split, min_reward, rewards), chat)
        print(f"{counted(count, 'conversation')} written to {chat}")
    if model is not None:
        export_model(chosen_checkpoint(run, checkpoint), model)
        print(f"model written to {model}")
    if adapter is not None:
        export_adapter(chosen_checkpoint(run, checkpoint), adapter)
        print(f"adapter written to {adapter}")


def _chosen(run: Path, split: str, min_reward: float | None, rewards: Path | None) -> Iterator[Episode]:
    from rllm.trainer.episode_records import stored_episodes
    from rllm.trainer.rescore import with_rewards

    found = stored_episodes(run)
    for episode in found if rewards is None else with_rewards(found, rewards):
        if split not in ("all", episode.info.get("split")):
            continue
        if min_reward is not None:
            scored = [(path, path.final_reward()) for path in episode.trajectories]
            episode.trajectories = [path for path, reward in scored if reward is not None and reward >= min_reward]
        if episode.trajectories or min_reward is None:
            yield episode


_MAX_ANSWER = 60


def rescore(
    run: Annotated[Path, typer.Argument(help="Folder of a run or an evaluation.")],
    reward: Annotated[
        str,
        typer.Option(
            help="Reward function, called with each task and the last answer's text; or judge:RUBRIC.yaml.",
            metavar="FILE.py:function",
        ),
    ],
    data: Annotated[str | None, optional("Training tasks of the run, if its folder has no tasks.jsonl.")] = None,
    val: Annotated[str | None, optional("Held-out tasks of the run, if its folder has no tasks.jsonl.")] = None,
    split: Split = None,
    val_split: ValSplit = None,
    top: Annotated[int, typer.Option(help="Number of largest changes to show.", min=0)] = 10,
    max_concurrent: Annotated[int, typer.Option(help="Number of rewards computed at the same time.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Compute new rewards for the stored episodes of a run or an evaluation, and show the changes.

    They are written to a new file, and the old ones are kept; `rllm export --rewards` reads it.
    """
    from rich.progress import Progress, TextColumn

    from rllm.cli.inputs import load_reward
    from rllm.rewards.scoring import check_reward, keep_verdicts
    from rllm.trainer.episode_records import stored_episodes
    from rllm.trainer.rescore import compare, write_rewards
    from rllm.trainer.rescore import rescore as scored_again

    # Without keys an agent in the same file as the reward could not construct a client.
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        os.environ.setdefault(name, "unused")
    function = load_reward(reward)
    check_reward(function)
    keep_verdicts(function, run)
    tasks = {**_tasks("train", data, split, "--data"), **_tasks("eval", val, val_split, "--val")}
    console = terminal.console(stderr=as_json)
    columns = TextColumn("scoring {task.completed}")
    with Progress(columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task("scoring", total=None)
        found = list(
            scored_again(
                stored_episodes(run, tasks),
                function,
                max_concurrent=max_concurrent,
                on_done=lambda count: bar.update(task, completed=count),
            )
        )
    if not found:
        raise ConfigError(f"run={str(run)!r} has no episode to score: all failed, or none ended")
    path = write_rewards(run, reward.rpartition(":")[2], found)
    comparison = compare(found, num_largest=top)
    _show_changes(console, comparison)
    console.print(f"New rewards: {path}", soft_wrap=True, markup=False)
    if as_json:
        terminal.print_json({**comparison.to_dict(), "file": str(path)})
    if comparison.num_failed == comparison.num_trajectories:
        raise RewardError(
            f"{reward} raised for {all_of(comparison.num_failed, 'trajectory', 'trajectories')}: {found[0].error}"
        )


def _tasks(split: str, source: str | None, part: str | None, option: str) -> dict[tuple[str, str], Task]:
    """Return the tasks of a run by split and task id."""
    from rllm.cli.inputs import read_tasks, split_option

    if source is None:
        if part is not None:
            raise ConfigError(f"{option} is missing: {split_option(option)} {part} has no effect without it")
        return {}
    rows = read_tasks(source, part, option=option)
    return {(split, rows.task_id(number)): task for number, task in enumerate(rows)}


def _show_changes(console: Console, found: Comparison) -> None:
    def shown(value: float | None) -> str:
        return "unscored" if value is None else number(value, digits=4)

    console.print(
        f"{found.num_changed} of {found.num_trajectories} rewards change; the mean was {shown(found.mean_before)} "
        f"and is {shown(found.mean_after)}"
    )
    if found.num_failed:
        console.print(f"[yellow]{counted(found.num_failed, 'reward')} raised: unscored, with reasons in the file[/]")
    if not found.largest:
        return
    rows = [
        (item.episode_id, item.name, shown(item.before), shown(item.after), _printable(item.error or item.answer))
        for item in found.largest
    ]
    terminal.print_table(["episode", "role", "before", "after", "answer"], rows, title="largest changes", on=console)


def _printable(answer: str) -> str:
    """Return the beginning of an answer in one line."""
    text = "".join(letter if letter.isprintable() else " " for letter in answer)
    return text if len(text) <= _MAX_ANSWER else f"{text[:_MAX_ANSWER]} ..."
