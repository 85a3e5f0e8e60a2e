"""Sample conversations of a step, from the lowest to the highest reward, as rows of a table and as excerpts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from rllm.errors import counted, number
from rllm.store.codec import plain_text
from rllm.types import Episode, Message, Trajectory, text_of

COLUMNS = ["step", "episode", "role", "reward", "correct", "ended", "conversation"]
MAX_CHARACTERS = 20_000
"""Maximum number of characters of a conversation; the store has all of it."""
_MAX_MESSAGES, _MAX_LINES, _LABEL = 6, 3, 11
"""Of an excerpt: messages, lines of each message, and the column at which roles end."""

Row: TypeAlias = "list[object]"
"""A value for each of `COLUMNS`; an unscored reward is `None`."""


def sample_rows(step: int, episodes: Sequence[Episode], most: int) -> list[Row]:
    """Return a row for each of the samples."""
    rows: list[Row] = []
    for episode, path in samples(episodes, most):
        reason = episode.termination_reason.value if episode.termination_reason else ""
        answered = path.steps[-1].chat_completions if path.steps else []
        messages = [f"{message.get('role', '')}: {message_text(message)}" for message in answered]
        row = [
            step,
            episode.id,
            path.name,
            path.final_reward(),
            bool(episode.is_correct),
            f"{episode.info['error'].get('type')}" if episode.failed else reason,
            plain_text("\n\n".join(messages))[:MAX_CHARACTERS],
        ]
        rows.append(row)
    return rows


def samples(episodes: Sequence[Episode], most: int) -> list[tuple[Episode, Trajectory]]:
    """Return the trajectories with the lowest and the highest reward, and others spread evenly between.

    Unscored ones sort first. The same episodes give the same samples.
    """

    def place(pair: tuple[Episode, Trajectory]) -> tuple[float, str, str]:
        reward = pair[1].final_reward()
        return float("-inf") if reward is None else reward, pair[0].id, pair[1].name

    paths = sorted(((episode, path) for episode in episodes for path in episode.trajectories), key=place)
    if len(paths) <= most:
        return paths
    if most < 2:
        return paths[len(paths) // 2 :][:most]
    return [paths[round(index * (len(paths) - 1) / (most - 1))] for index in range(most)]


def excerpts(episodes: Sequence[Episode], most: int, *, width: int) -> Iterator[str]:
    """Yield the samples in a few lines each: the end of the prompt, the last messages, and the reward."""
    for episode, path in samples(episodes, most):
        role = f" {path.name}" if len({other.name for other in episode.trajectories}) > 1 else ""
        yield f"  sample {episode.id}{role}: {', '.join(_verdict(episode, path))}"
        messages = path.steps[-1].chat_completions if path.steps else []
        if len(messages) > _MAX_MESSAGES:
            yield f"{'...':>{_LABEL}}  {counted(len(messages) - _MAX_MESSAGES, 'earlier message')}"
        for message in messages[-_MAX_MESSAGES:]:
            yield _excerpt(message, width)


def _verdict(episode: Episode, path: Trajectory) -> list[str]:
    """Return reward and outcome of a sample."""
    reward = path.final_reward()
    parts = ["unscored" if reward is None else f"reward {number(reward, decimals=3)}"]
    if episode.failed:
        parts.append(f"failed with {episode.info['error'].get('type')}")
    elif reward is not None:
        parts.append("correct" if episode.is_correct else "wrong")
    cut = sum(step.finish_reason == "length" for step in path.steps)
    return [*parts, *(["cut off"] if cut else [])]


def _excerpt(message: Message, width: int) -> str:
    """Return a message in at most `_MAX_LINES` lines: the end of a prompt, both ends of an answer."""
    text = " ".join(plain_text(message_text(message)).split())
    room = _MAX_LINES * max(width - _LABEL - 2, 20)
    if len(text) > room:
        is_answer = message.get("role") == "assistant"
        head = text[: room * 2 // 3] if is_answer else ""
        text = f"{head} ... {text[len(head) + 5 - room :]}".strip()
    indent = " " * (_LABEL + 2)
    lines = textwrap.wrap(text, max(width, _LABEL + 22), initial_indent=indent, subsequent_indent=indent) or [indent]
    return f"{message.get('role', ''):>{_LABEL}}  {lines[0][_LABEL + 2 :]}" + "".join(f"\n{line}" for line in lines[1:])


def message_text(message: Message) -> str:
    """Return the text of a message, and its tool calls as `name(arguments)`."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or [] if isinstance(call, Mapping)]
    shown = (f"{call.get('name')}({call.get('arguments')})" for call in calls)
    return "\n".join(filter(None, [text_of(message).strip(), *shown]))
