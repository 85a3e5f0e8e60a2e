"""A few episodes of a step as the rows of a table: conversations from the worst to the best rewarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm.store.codec import plain_text
from rllm.types import Episode, Message, Trajectory, text_of

COLUMNS = ["step", "episode", "role", "reward", "correct", "ended", "conversation"]
NUM_SAMPLES = 4
MAX_CHARACTERS = 20_000
"""Of a conversation; the store has it whole."""

Row = list[Any]
"""A value for each of `COLUMNS`; an unscored reward is `None`."""


def sample_rows(step: int, episodes: Sequence[Episode], most: int = NUM_SAMPLES) -> list[Row]:
    """Of the trajectories, the one that earned least, the one that earned most, and others evenly between; those that were
    not scored come first. The same episodes give the same rows."""
    paths = [(episode, path) for episode in episodes for path in episode.trajectories]
    paths.sort(key=lambda pair: (_reward(pair[1]), pair[0].id, pair[1].name))
    return [_row(step, episode, path) for episode, path in _spread(paths, most)]


def _reward(path: Trajectory) -> float:
    reward = path.final_reward()
    return float("-inf") if reward is None else reward


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _row(step: int, episode: Episode, path: Trajectory) -> Row:
    reason = episode.termination_reason.value if episode.termination_reason else ""
    return [
        step,
        episode.id,
        path.name,
        path.final_reward(),
        bool(episode.is_correct),
        f"{episode.info['error'].get('type')}" if episode.failed else reason,
        conversation_text(path)[:MAX_CHARACTERS],
    ]


def conversation_text(path: Trajectory) -> str:
    """The messages of a trajectory's last call and its answer, each behind its role, in text that can be encoded."""
    messages = path.steps[-1].chat_completions if path.steps else []
    return plain_text("\n\n".join(f"{message.get('role', '')}: {_said(message)}" for message in messages))


def _said(message: Message) -> str:
    calls = [call.get("function") or {} for call in message.get("tool_calls") or [] if isinstance(call, Mapping)]
    return "\n".join(
        filter(None, [text_of(message).strip(), *(f"{call.get('name')}({call.get('arguments')})" for call in calls)])
    )
