"""Input, output and settings of reward functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rllm.types import Task


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
    """For an answer that takes longer to judge than it may."""
    toolcall_bonus: float = 0.5
    """Bonus for a correct mathematical answer if the task has `has_toolcall` set."""


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """An answer to judge, and the task it answers."""

    task_info: Task
    action: Any
    """The model's text, bare or in an `Action`."""

    @classmethod
    def of(cls, task_info: Task | RewardInput, action: Any) -> RewardInput:
        """Return the input for either way of calling a reward: `(task_info, action)`, or one `RewardInput`."""
        return task_info if isinstance(task_info, RewardInput) else cls(task_info=task_info, action=action)


@dataclass
class RewardOutput:
    """A verdict."""

    reward: float | None
    """`None`: unscored, which is not 0."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Reasons: the extracted and the expected answer, or the failure."""
    is_correct: bool | None = None
    """`None` if the reward does not decide it."""
