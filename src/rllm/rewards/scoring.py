"""Calls of reward functions, and validation of their results."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from rllm._runtime.threads import in_thread
from rllm.capture import snapshot
from rllm.errors import ConfigError, RewardError, RolloutError, boundary, shown
from rllm.rewards.reward_types import RewardOutput
from rllm.types import Episode, Trajectory, is_scored

MAX_REWARD = 1e30
"""Sums and squares of a group's rewards must stay finite in float32's range of exponents."""

ACCEPTED = "a number, (reward, {metric: number}), a RewardOutput, or None for 'not scored'"


def as_reward_output(reward_fn: Callable[[Any, Any], Any], task: Any, action: Any) -> RewardOutput:
    """Call `reward_fn(task, action)` and return its result as a `RewardOutput` with a finite reward or `None`.

    A function with parameters named as in `RewardFunction`, `task_info` and `action`, may have them in any order.

    Raises:
        RewardError: naming the function, if it raises, or returns anything other than
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
    except (TypeError, ValueError):  # a builtin without a signature
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
    """Return a reward as a finite float, or `None` if it is unscored.

    Raises:
        RolloutError: of the type `error`, naming the function, if it is not a finite number.
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
    """Return whether this is a scalar number of Python, NumPy or torch."""
    if isinstance(value, bool | int | float):
        return True
    return getattr(value, "shape", None) == () and hasattr(value, "item") and isinstance(value.item(), int | float)


_ADDRESS_PARAMETERS = ("base_url", "session_url")
"""Parameters that give an agent the address of its model."""


def with_reward(agent: Callable[..., Any], reward: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a function that runs the agent and scores its answer with `reward(task, answer)`.

    The reward sees the task as it was passed in, without changes made by the agent. It may return anything that
    `as_reward_output` accepts; finite numbers in its metadata become metrics.

    Raises:
        ConfigError: if the reward cannot be called with a task and an answer, or is a coroutine function.
    """
    check_reward(reward)
    if inspect.iscoroutinefunction(agent):

        @functools.wraps(agent)
        async def run_async(**task: Any) -> Episode:
            return await _score_later(agent(**snapshot(task)), reward, task)

        return run_async

    @functools.wraps(agent)
    def run_sync(**task: Any) -> Episode | Coroutine[Any, Any, Episode]:
        answer = agent(**snapshot(task))
        return _score_later(answer, reward, task) if inspect.isawaitable(answer) else _episode(reward, task, answer)

    return run_sync


def check_reward(reward: Callable[..., Any]) -> None:
    """Check that a reward function can be called with a task and an answer.

    Raises:
        ConfigError: if it cannot, or is a coroutine function.
    """
    name = getattr(reward, "__qualname__", repr(reward))
    if inspect.iscoroutinefunction(reward):
        raise ConfigError(
            f"reward {name} is a coroutine function: a reward function is an ordinary one, called in a thread"
        )
    try:
        inspect.signature(reward).bind({}, "")
    except TypeError as error:
        raise ConfigError(
            f"reward {name}: it is called with a task and an answer, as in `def reward(task, answer)`; {error}"
        ) from error
    except ValueError:  # a builtin without a signature
        return


async def _score_later(answer: Awaitable[Any], reward: Callable[[Any, Any], Any], task: Mapping[str, Any]) -> Episode:
    judge = functools.partial(_episode, reward, task, await answer)
    return await in_thread(judge, name=f"reward {getattr(reward, '__qualname__', repr(reward))}")


def _episode(reward: Callable[[Any, Any], Any], given: Mapping[str, Any], answer: Any) -> Episode:
    task = {name: value for name, value in given.items() if name not in _ADDRESS_PARAMETERS}
    verdict = as_reward_output(reward, task, answer)
    right = verdict.reward is not None and verdict.reward >= 1.0
    unscored = {"unscored": f"reward {getattr(reward, '__qualname__', repr(reward))} returned None"}
    return Episode(
        trajectories=[Trajectory(reward=verdict.reward, output=answer)],
        is_correct=right if verdict.is_correct is None else verdict.is_correct,
        metrics={
            name: float(value)
            for name, value in verdict.metadata.items()
            if is_number(value) and -MAX_REWARD <= value <= MAX_REWARD
        },
        info=unscored if verdict.reward is None else {},
    )
