"""New rewards for stored episodes, written next to the old ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from rllm._runtime.files import replace_text
from rllm._runtime.untrusted import parse_json
from rllm.engine.event_loop import run_anywhere
from rllm.errors import ConfigError, RewardError
from rllm.evaluation.report import mean_of_known
from rllm.rewards.reward_types import RewardOutput
from rllm.rewards.scoring import AnyReward, score, score_group, scores_groups
from rllm.trainer.episode_records import was_learnable
from rllm.types import Episode, JSONObject, Trajectory, grouped

Scored: TypeAlias = tuple[Episode, int, Trajectory]
"""A trajectory to score: its episode, its index there, and the trajectory itself."""

FOLDER = "rescored"
"""Folder of new rewards in a run's folder, one file for each rescoring."""
_SAME = 1e-9
_AT_A_TIME = 64


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """Old and new reward of one trajectory."""

    episode_id: str
    session_id: str
    split: str
    trajectory: int
    name: str
    before: float | None
    after: float | None
    """`None` if not scored."""
    answer: str
    is_correct: bool | None = None
    """`None` if the new reward does not decide it."""
    error: str | None = None

    @property
    def change(self) -> float:
        """Difference of the rewards; unscored counts as 0."""
        return (self.after or 0.0) - (self.before or 0.0)

    @property
    def has_changed(self) -> bool:
        """Return whether the reward, or whether it is scored, differs."""
        return (self.before is None) != (self.after is None) or abs(self.change) > _SAME


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """New rewards compared with the old."""

    num_trajectories: int
    num_changed: int
    num_failed: int
    """Trajectories for which the new reward function raised an error or took too long."""
    mean_before: float | None
    mean_after: float | None
    largest: Sequence[Rescored]

    def to_dict(self) -> JSONObject:
        return asdict(self)


def rescore(
    episodes: Iterable[Episode],
    reward_fn: AnyReward,
    *,
    max_concurrent: int = 8,
    timeout_s: float = 600.0,
    on_done: Callable[[int], None] = lambda count: None,
) -> Iterator[Rescored]:
    """Score the last answer of every trajectory again, in order.

    Failed episodes, and trajectories that could not be learned from (see `was_learnable`), such as an opponent's, stay
    unchanged.

    Args:
        episodes: of a run or an evaluation.
        reward_fn: called with each task and answer, or with a group's task and answers if it scores groups.
        max_concurrent: rewards computed at a time.
        timeout_s: seconds for each reward.
        on_done: called with the number completed.

    Raises:
        ConfigError: if an episode has no task, because its folder has lost them.
    """
    paths = (
        (episode, number, path)
        for episode in episodes
        if not episode.failed
        for number, path in enumerate(episode.trajectories)
        if was_learnable(episode, path)
    )
    num_done = itertools.count(1)

    async def judged(some: Sequence[Sequence[Scored]]) -> list[Rescored]:
        free = asyncio.Semaphore(max_concurrent)

        async def one(unit: Sequence[Scored]) -> list[Rescored]:
            async with free:
                rescored = await _rescored(unit, reward_fn, timeout_s)
            for _ in unit:
                on_done(next(num_done))
            return rescored

        return list(itertools.chain.from_iterable(await asyncio.gather(*map(one, some))))

    units = _groups(paths) if scores_groups(reward_fn) else ([item] for item in paths)
    while some := list(itertools.islice(units, _AT_A_TIME * max_concurrent)):
        yield from run_anywhere(partial(judged, some))


def _groups(paths: Iterable[Scored]) -> Iterator[list[Scored]]:
    """Yield the trajectories that are compared with each other, once all of them are in memory."""

    def key(episode: Episode, path: Trajectory) -> tuple[object, ...]:
        return episode.info.get("split"), episode.info.get("training_step"), episode.task_id, path.name

    yield from grouped((key(episode, path), (episode, number, path)) for episode, number, path in paths).values()


async def _rescored(unit: Sequence[Scored], reward_fn: AnyReward, timeout_s: float) -> list[Rescored]:
    """Return the new rewards of a group, or of a single trajectory."""
    episode, _, path = unit[0]
    if episode.task is None:
        option = "--val" if episode.info.get("split") == "eval" else "--data"
        raise ConfigError(
            f"episode {episode.id!r} has no task, since its folder has no tasks.jsonl: name the tasks of the run with "
            f"{option}"
        )
    verdicts, error = [RewardOutput(None)] * len(unit), None
    try:
        if scores_groups(reward_fn):
            paths = [path for _, _, path in unit]
            verdicts = await score_group(reward_fn, episode.task, paths, timeout_s=timeout_s)
        else:
            verdicts = [await score(reward_fn, episode.task, _last_answer(path), timeout_s=timeout_s)]
    except RewardError as raised:
        error = str(raised)
    return [
        Rescored(
            episode_id=episode.id,
            session_id=episode.session_id,
            split=str(episode.info.get("split", "")),
            trajectory=number,
            name=path.name,
            before=path.final_reward(),
            after=verdict.reward,
            answer=_last_answer(path),
            is_correct=verdict.is_correct,
            error=error,
        )
        for (episode, number, path), verdict in zip(unit, verdicts, strict=True)
    ]


def _last_answer(path: Trajectory) -> str:
    return path.steps[-1].model_response if path.steps else ""


def compare(rescored: Sequence[Rescored], *, num_largest: int = 10) -> Comparison:
    """Return a summary of the changes."""
    changed = [item for item in rescored if item.has_changed]
    return Comparison(
        num_trajectories=len(rescored),
        num_changed=len(changed),
        num_failed=sum(item.error is not None for item in rescored),
        mean_before=mean_of_known(item.before for item in rescored),
        mean_after=mean_of_known(item.after for item in rescored),
        largest=sorted(changed, key=lambda item: -abs(item.change))[:num_largest],
    )


def write_rewards(folder: Path, name: str, rescored: Iterable[Rescored]) -> Path:
    """Write a new file in the folder's `rescored`, without touching existing ones, and return its path."""
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-")
    taken = {path.stem for path in target.iterdir()}
    numbered = (stem if number == 1 else f"{stem}-{number}" for number in range(1, len(taken) + 2))
    path = target / f"{next(free for free in numbered if free not in taken)}.jsonl"
    replace_text(path, "".join(json.dumps(asdict(item)) + "\n" for item in rescored))
    return path


def with_rewards(episodes: Iterable[Episode], path: Path) -> Iterator[Episode]:
    """Yield the episodes with the rewards of a file written by `write_rewards`.

    The last verdict on an episode's trajectories decides whether the episode is correct.

    Raises:
        ConfigError: if the file is not one.
    """
    try:
        rows = [parse_json(line) for line in path.read_bytes().split(b"\n") if line.strip()]
        rewards = {(row["session_id"], row["trajectory"]): (row["after"], row.get("is_correct")) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"rewards={str(path)!r} is not a file of `rllm rescore`: {error}") from error
    for episode in episodes:
        verdicts = []
        for number, trajectory in enumerate(episode.trajectories):
            if (episode.session_id, number) in rewards:
                trajectory.reward, is_correct = rewards[episode.session_id, number]
                for step in trajectory.steps:  # else their sum would replace a missing reward
                    step.reward = None
                if is_correct is None and trajectory.reward is not None:
                    is_correct = trajectory.reward >= 1.0
                verdicts.append(is_correct)
        if verdicts:
            known = [verdict for verdict in verdicts if verdict is not None]
            episode.is_correct = bool(known) and known[-1]
        yield episode
