"""Rejection sampling: earlier rollouts with enough reward as rows to learn from, with their tokens unchanged."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rllm.capture.side_calls import side_calls
from rllm.data.dataset import Dataset
from rllm.data.rows import Table, given_task
from rllm.engine.episode_log import plain_task_id
from rllm.errors import ConfigError, counted
from rllm.store.base import SessionInfo, TraceStore, every_session
from rllm.store.codec import readable_json
from rllm.trainer.credit import FROZEN
from rllm.trainer.selection import NOT_TEXT
from rllm.types import (
    NOT_TEXT_KEY,
    OUTCOME_KEY,
    REWARD_KEY,
    Episode,
    JSONMapping,
    JSONObject,
    Step,
    Trace,
    Trajectory,
    credits_by_trace,
    task_id_of,
)

T = TypeVar("T", Trajectory, Episode)

Row = JSONObject


def process_trajectories(trajectories: Iterable[Trajectory], reward_threshold: float) -> list[Row]:
    """Return rows of the trainable trajectories that earned at least `reward_threshold`; unscored ones are left out.

    A row has the `messages`, for reading, the exact token ids as `steps`, the `reward`, the `name` of the role and a
    `task_id`. It is JSON. A trajectory of a server without token ids has no `steps`: its messages are rendered by the
    template.

    Raises:
        ConfigError: if a trajectory has no ids and its messages are not one conversation, or it has non-text content.
    """
    return [
        row_of(trajectory)
        for trajectory in trajectories
        if trajectory.trainable and (reward := trajectory.final_reward()) is not None and reward >= reward_threshold
    ]


def row_of(trajectory: Trajectory, task_id: str | None = None) -> Row:
    """Return the trajectory as a row; without `task_id`, trajectories of equal tasks have equal ids."""
    spoken = [step for step in trajectory.steps if step.response_ids]
    if not spoken and not trajectory.is_cumulative():
        raise ConfigError(
            f"trajectory {trajectory.name!r} has no token ids, and its steps do not extend each other, so it is not "
            "one conversation: give rows with the messages of each step instead"
        )
    if kinds := sorted({kind for step in trajectory.steps for kind in step.info.get(NOT_TEXT_KEY, ())}):
        raise ConfigError(
            f"trajectory {trajectory.name!r} has messages with parts of type {', '.join(kinds)}, and the policy learns "
            "from text only: leave it out"
        )
    row: Row = {
        "task_id": task_id or hashlib.sha256(readable_json(trajectory.task, sort_keys=True)).hexdigest()[:16],
        "name": trajectory.name,
        "reward": trajectory.final_reward(),
        "messages": trajectory.steps[-1].chat_completions if trajectory.steps else [],
    }
    if spoken:
        row["steps"] = [{"prompt_ids": step.prompt_ids, "response_ids": step.response_ids} for step in spoken]
    return row


def rows_of_episode(episode: Episode) -> list[Row]:
    """Return the rows of its trainable trajectories; none if the episode failed."""
    if episode.failed:
        return []
    task_id = plain_task_id(episode.task_id) or None
    return [row_of(trajectory, task_id) for trajectory in episode.trajectories if trajectory.trainable]


def rows_of_store(store: TraceStore, run_id: str | None = None) -> list[Row]:
    """Return every trajectory that the trainer credited, with its reward, oldest first.

    Trajectories of failed rollouts are left out. Without `run_id`, all runs of the store are included, and all sessions
    of a gateway whose metadata has a `reward`. In a run with algorithm.level=step, steps with different returns are
    rows of their own.
    """
    rows: list[Row] = []
    for session in every_session(store, oldest_first=True, run_id=run_id):
        metadata = session.metadata
        of_gateway = run_id is None and "split" not in metadata and reward_of(metadata) is not None
        outcome = metadata.get(OUTCOME_KEY)
        has_failed = isinstance(outcome, Mapping) and bool(outcome.get("error"))
        if (metadata.get("split") == "train" or of_gateway) and not has_failed:
            rows += _rows_of_session(store, session)
    return rows


def sampled_from(rows: Sequence[Row], *, reward_threshold: float | None, best_per_task: int | None) -> list[Row]:
    """Return the rows that earned enough, and for each task at most the best few.

    Raises:
        ConfigError: if rows have no reward, or one that is not a number, or no row is left.
    """
    for number, row in enumerate(rows):
        if not isinstance(row.get("reward"), int | float | None):
            raise ConfigError(
                f"row {number}: reward={row['reward']!r:.80}: use a number, or leave it out if the row was not scored"
            )
    if reward_threshold is None and best_per_task is None:
        return list(rows)
    key = "reward_threshold" if reward_threshold is not None else "best_per_task"
    scored = [row for row in rows if row.get("reward") is not None]
    if not scored:
        raise ConfigError(f"sft.{key} needs rewards, and no row has one: leave it out")
    kept = [row for row in scored if reward_threshold is None or row["reward"] >= reward_threshold]
    if not kept:
        raise ConfigError(
            f"sft.reward_threshold={reward_threshold} leaves nothing of "
            f"{counted(len(rows), 'trajectory', 'trajectories')}: "
            f"the highest reward is {max(row['reward'] for row in scored)}"
        )
    return kept if best_per_task is None else _best(kept, best_per_task)


def _best(rows: Sequence[Row], count: int) -> list[Row]:
    taken: Counter[str] = Counter()
    chosen = []
    for place in sorted(range(len(rows)), key=lambda place: -rows[place]["reward"]):
        task_id = task_id_of(rows[place], place)
        taken[task_id] += 1
        if taken[task_id] <= count:
            chosen.append(place)
    return [rows[place] for place in sorted(chosen)]


def reward_of(metadata: JSONMapping) -> float | None:
    """Return the reward in a session's metadata; `None` if there is no number."""
    reward = metadata.get(REWARD_KEY)
    return float(reward) if isinstance(reward, int | float) else None


def learnable_steps(traces: Sequence[Trace]) -> list[Step]:
    """Return the successful calls of a session as steps, without side calls and content other than text."""
    aside = side_calls(traces)
    steps = [Step.from_trace(trace) for trace in traces if trace.error is None and trace.id not in aside]
    return [step for step in steps if NOT_TEXT_KEY not in step.info]


def _rows_of_session(store: TraceStore, session: SessionInfo) -> list[Row]:
    """Return one row for each trained trajectory, or for each reward if its steps were rewarded separately."""
    task_id = plain_task_id(str(session.metadata.get("task_id", session.id)))
    if "split" not in session.metadata:
        learned = learnable_steps(store.by_session(session.id))
        whole = Trajectory(name="agent", steps=learned, reward=reward_of(session.metadata))
        return [row_of(whole, task_id)] if learned else []
    credits_of = credits_by_trace(store.credits(session.id))
    by_trajectory: dict[tuple[int, str, float | None], list[Step]] = {}
    for trace in store.by_session(session.id):
        for credit in credits_of.get(trace.id, ()) if trace.error is None else ():
            if credit.dropped not in (FROZEN, NOT_TEXT):
                path = (credit.trajectory_index, credit.trajectory_name, credit.reward)
                by_trajectory.setdefault(path, []).append(Step.from_trace(trace))
    return [
        row_of(Trajectory(name=name, steps=steps, reward=reward), task_id)
        for (_, name, reward), steps in by_trajectory.items()
    ]


def rows_of_items(items: Iterable[Any]) -> list[Row]:
    """Return rows of what a user may have: rows, a table, trajectories, episodes, or what their `to_dict` returns.

    Raises:
        ConfigError: naming an item that is none of these.
    """
    if Table.of(items) is not None:
        items = Dataset(items, name="demonstrations")
    is_read = isinstance(items, Dataset)
    return [row for number, item in enumerate(items) for row in _rows_of_item(item, number, is_read=is_read)]


def _rows_of_item(item: object, number: int, *, is_read: bool) -> list[Row]:
    if isinstance(item, Trajectory):
        return [row_of(item)] if item.trainable else []
    if isinstance(item, Episode):
        return rows_of_episode(item)
    if not isinstance(item, Mapping):
        raise ConfigError(f"row {number} is {item!r:.100}: use an object with messages, a Trajectory or an Episode")
    if "trajectories" in item:
        return rows_of_episode(_parsed(Episode, item, f"row {number} has trajectories but is not an episode"))
    if "trainable" in item and "steps" in item:
        return _rows_of_item(_parsed(Trajectory, item, f"row {number} is not a trajectory"), number, is_read=True)
    return [dict(item) if is_read else given_task(item, f"row {number}")]


def _parsed(kind: type[T], item: JSONMapping, problem: str) -> T:
    try:
        parsed: T = kind.from_dict(item)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{problem}: {error}") from error
    return parsed
