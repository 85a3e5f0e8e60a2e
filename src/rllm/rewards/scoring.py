"""What a user's reward function returns, as a `RewardOutput`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from rllm.errors import RewardError, RolloutError, boundary, shown
from rllm.rewards.reward_types import RewardOutput
from rllm.types import is_scored

MAX_REWARD = 1e30
"""Sums and squares of a group's rewards must stay finite in float32's range of exponents."""

ACCEPTED = "a number, (reward, {metric: number}), a RewardOutput, or None for 'not scored'"


def as_reward_output(reward_fn: Callable[[Any, Any], Any], task: Any, action: Any) -> RewardOutput:
    """Call `reward_fn(task, action)` and give its verdict one form, whose reward is a finite float or `None`: unscored.

    A function whose parameters have the names of `RewardFunction`, `task_info` and `action`, may have them in any order.

    Raises:
        RewardError: naming the function, if it raises, or returns something else than
            `float | (float, metrics) | RewardOutput | None`.
    """
    name = f"reward function {_name_of(reward_fn)}"
    with boundary(RewardError, name):
        returned = _call(reward_fn, task, action)
    return _reward_output(returned, name)


def _call(reward_fn: Callable[..., Any], task: Any, action: Any) -> Any:
    return reward_fn(task_info=task, action=action) if _is_called_by_name(reward_fn) else reward_fn(task, action)


def _is_called_by_name(reward_fn: Callable[..., Any]) -> bool:
    """As environments of the rLLM framework call all of them."""
    try:
        parameters = inspect.signature(reward_fn).parameters
    except (TypeError, ValueError):  # a builtin that says nothing of its parameters
        return False
    found = [parameters[name] for name in ("task_info", "action") if name in parameters]
    return len(found) == 2 and all(item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY) for item in found)


def _name_of(reward_fn: Callable[..., Any]) -> str:
    return getattr(reward_fn, "__qualname__", None) or type(reward_fn).__qualname__


def _reward_output(returned: Any, name: str) -> RewardOutput:
    if isinstance(returned, RewardOutput):
        return RewardOutput(checked_reward(returned.reward, name), returned.metadata, returned.is_correct)
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        verdict = _reward_output(returned[0], name)
        return RewardOutput(verdict.reward, {**verdict.metadata, **returned[1]}, verdict.is_correct)
    return RewardOutput(checked_reward(returned, name))


def checked_reward(value: Any, name: str, error: type[RolloutError] = RewardError) -> float | None:
    """A reward as a finite float, or `None` where it is unscored.

    Raises:
        RolloutError: of the type `error`, naming whose reward it is, if it is no finite number.
    """
    if not is_scored(value):
        return None
    if inspect.iscoroutine(value):
        value.close()
        raise error(f"{name} is a coroutine function: a reward function is an ordinary one, called in a thread")
    if not is_number(value):
        raise error(f"{name} returned {shown(value)} of type {type(value).__name__}: return {ACCEPTED}")
    try:
        reward = float(value)
    except OverflowError:  # an integer beyond all floats
        reward = math.inf
    if not math.isfinite(reward):
        raise error(f"{name} returned the reward {reward!r}: return a finite number, or None for 'not scored'")
    return reward


def is_number(value: Any) -> bool:
    """Whether this is a scalar number: Python's, NumPy's or a tensor's."""
    if isinstance(value, bool | int | float):
        return True
    return getattr(value, "shape", None) == () and hasattr(value, "item") and isinstance(value.item(), int | float)
