"""Ready-made rewards as functions of a task and an action, and the protocol of your own.

An action is the model's text, bare or in an `Action`. A function raises `RewardError` for a task that it cannot score,
which leaves the rollout unscored.
"""

from __future__ import annotations

from typing import Protocol

from rllm.rewards.code_reward import RewardCodeFn
from rllm.rewards.math_reward import RewardMathFn
from rllm.rewards.reward_types import (
    RewardConfig,
    RewardInput,
    RewardOutput,
    after_thinking,
    field_of,
    text_of_action,
    texts_of,
)
from rllm.rewards.scoring import as_reward_output
from rllm.rewards.search_reward import RewardChoiceFn, RewardSearchFn, f1_score
from rllm.types import Action, JSONMapping, Task

__all__ = [
    "Action",
    "RewardCodeFn",
    "RewardConfig",
    "RewardFunction",
    "RewardInput",
    "RewardMathFn",
    "RewardOutput",
    "RewardSearchFn",
    "as_reward_output",
    "code_reward_fn",
    "f1_reward_fn",
    "math_reward_fn",
    "multiple_choice_reward_fn",
    "search_reward_fn",
    "zero_reward",
]


class RewardFunction(Protocol):
    """Protocol of reward functions; `as_reward_output` lists what they may return."""

    def __call__(
        self, task_info: Task, action: str | Action
    ) -> RewardOutput | float | tuple[float, JSONMapping] | None:
        """Judge the action for the task."""


def math_reward_fn(task_info: Task, action: str | Action) -> RewardOutput:
    r"""Return 1.0 if the last `\boxed{}` equals the task's `ground_truth` as mathematics; see `RewardMathFn`."""
    return RewardMathFn()(task_info, action)


def search_reward_fn(task_info: Task, action: str | Action) -> RewardOutput:
    """Return 1.0 for an exact match of the task's `ground_truth`, else the overlap of words; see `RewardSearchFn`."""
    return RewardSearchFn()(task_info, action)


def f1_reward_fn(task_info: Task, action: str | Action) -> RewardOutput:
    """Return the F1 of the words of the whole text and the task's `ground_truth` (or `answer`)."""
    golds = texts_of(field_of(task_info, "ground_truth", "answer", reward="the F1 reward"), "the F1 reward")
    answer = after_thinking(text_of_action(action, "the F1 reward"))
    f1 = max(f1_score(answer, gold) for gold in golds)
    return RewardOutput(f1, {"f1": f1}, is_correct=f1 == 1.0)


def multiple_choice_reward_fn(task_info: Task, action: str | Action) -> RewardOutput:
    """Return 1.0 for the letter of the task's `ground_truth`; see `RewardChoiceFn`."""
    return RewardChoiceFn()(task_info, action)


def code_reward_fn(task_info: Task, action: str | Action) -> RewardOutput:
    """Return 1.0 if the last block of Python passes the task's tests; see `RewardCodeFn`."""
    return RewardCodeFn()(task_info, action)


def zero_reward(task_info: Task, action: str | Action) -> RewardOutput:
    """Return 0.0 for any answer."""
    return RewardOutput(0.0)
