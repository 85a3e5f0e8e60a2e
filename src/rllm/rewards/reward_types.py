"""Input, output and settings of reward functions, and the search for what they need in tasks and model texts.

All patterns take time linear in the text, because the text is whatever a model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from numbers import Real
from textwrap import dedent
from typing import Any

from rllm.errors import RewardError
from rllm.types import Action, JSONObject, Task

END_OF_THOUGHT = "</think>"

_LATEX_TOKEN = re.compile(r"\\f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)
_FENCE = re.compile(r"^(?P<indent>[ \t]*)```[ \t]*(?P<language>\w*)[^\n]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py", "py3")


class RewardType(Enum):
    """Kind of task that a reward scores."""

    MATH = "MATH"
    COUNTDOWN = "COUNTDOWN"
    SEARCH = "SEARCH"
    MULTIPLE_CHOICE = "MULTIPLE_CHOICE"
    CODE = "CODE"
    UNK = "UNK"


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards of right and wrong answers."""

    correct_reward: float = 1.0
    incorrect_reward: float = 0.0
    format_error_reward: float = 0.0
    """For text in which no answer was found."""
    unk_error_reward: float = 0.0
    """For an answer that could not be judged in time."""
    toolcall_bonus: float = 0.5
    """Bonus for a correct mathematical answer if the task has `has_toolcall` set."""


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """An answer to judge, and the task it answers."""

    task_info: Task
    action: object
    """The model's text, bare or in an `Action`."""

    @classmethod
    def of(cls, task_info: Task | RewardInput, action: object) -> RewardInput:
        """Return the input for either way of calling a reward: `(task_info, action)`, or one `RewardInput`."""
        return task_info if isinstance(task_info, RewardInput) else cls(task_info=task_info, action=action)


@dataclass
class RewardOutput:
    """A verdict."""

    reward: float | None
    """`None`: unscored, which is not 0."""
    metadata: JSONObject = field(default_factory=dict)
    """Reasons: the extracted and the expected answer, or the failure."""
    is_correct: bool | None = None
    """`None` if the reward does not decide it."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, unweighted, if it has several."""


def field_of(task: object, *names: str, reward: str) -> Any:
    """Return the first of these fields that the task has and that is not `None`.

    Raises:
        RewardError: if the task has none of them, so that the rollout stays unscored; the message lists its fields.
    """
    if not isinstance(task, Mapping):
        raise RewardError(f"{reward} needs a task that is a mapping, not {type(task).__name__}")
    for name in names:
        if task.get(name) is not None:
            return task[name]
    raise RewardError(
        f"{reward} needs the task's field {' or '.join(map(repr, names))}; this task has {sorted(map(str, task))}"
    )


def texts_of(truth: object, reward: str) -> list[str]:
    """Return the ground truths of a task as texts: it may be one text or number, or a list of alternatives.

    Raises:
        RewardError: if it is empty or something else.
    """
    truth = truth.tolist() if hasattr(truth, "tolist") else truth  # NumPy's, from a parquet file
    items = list(truth) if isinstance(truth, list | tuple | set | frozenset) else [truth]
    if items and all(isinstance(item, str | Real | Decimal) for item in items):
        return [str(item) for item in items]
    raise RewardError(f"{reward} needs a ground truth that is a text, a number or a list of them, not {truth!r:.200}")


def text_of_action(action: object, reward: str) -> str:
    """Return the model's text, given bare or in an `Action`; an empty action is the empty text.

    Raises:
        RewardError: if the action is not text.
    """
    text = action.action if isinstance(action, Action) else action
    if text is None:
        return ""
    if not isinstance(text, str):
        raise RewardError(f"{reward} judges text, and the action is of type {type(text).__name__}: {text!r:.200}")
    return text


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`, or all of it if there is none."""
    return text.rpartition(END_OF_THOUGHT)[2]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced `\boxed{...}` or `\fbox{...}`, the innermost if nested."""
    opened: list[tuple[bool, int]] = []
    last_start, content = -1, None
    for token in _LATEX_TOKEN.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            opened.append((token[0] != "{", token.end()))
        elif token[0] == "}" and opened:
            is_box, start = opened.pop()
            if is_box and start > last_start:
                last_start, content = start, text[start : token.start()]
    return content.strip() if content is not None else None


def last_tagged(text: str, tag: str) -> str | None:
    """Return the content of the last complete `<tag>...</tag>`."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, content = before.rpartition(f"<{tag}>")
    return content.strip() if opening and closing else None


def python_blocks(text: str) -> list[str]:
    """Return the code of all closed fences marked as Python, or of all unmarked fences if there are none."""
    fences = list(_FENCE.finditer(text))
    marked: list[str] = []
    unmarked: list[str] = []
    index = 0
    while index + 1 < len(fences):
        opening, closing = fences[index], fences[index + 1]
        if closing["language"]:  # a language opens a block: the one before was never closed
            index += 1
            continue
        block = text[opening.end() : closing.start()].strip("\n")
        if opening["indent"]:  # in a list
            block = dedent(block)
        language = opening["language"].lower()
        if language in _PYTHON:
            marked.append(block)
        elif not language:
            unmarked.append(block)
        index += 2
    return marked or unmarked
