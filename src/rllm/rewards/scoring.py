"""Calls of reward functions, and validation of their results."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeGuard

from rllm._runtime.threads import in_thread
from rllm.capture import snapshot
from rllm.errors import ConfigError, RewardError, RolloutError, boundary, shown
from rllm.rewards.reward_types import RewardOutput
from rllm.types import Episode, JSONMapping, Trajectory, Unscored

MAX_REWARD = 1e30
"""Limit of a metric, whose sums and squares must stay finite in float32's range of exponents."""

ACCEPTED = "a number, (reward, {metric: number}), a RewardOutput, or None for 'not scored'"

Judge: TypeAlias = Callable[..., object]
"""A reward function of a user; `as_reward_output` lists what it may return."""


def as_reward_output(reward_fn: Judge, task: object, action: object) -> RewardOutput:
    """Call `reward_fn(task, action)` and return its result as a `RewardOutput` with a finite reward or `None`.

    A function with parameters named as in `RewardFunction`, `task_info` and `action`, may have them in any order.

    Raises:
        RewardError: naming the function, if it raises, or returns anything other than
            `float | (float, metrics) | RewardOutput | None`.
    """
    name = f"reward function {getattr(reward_fn, '__qualname__', None) or type(reward_fn).__qualname__}"
    with boundary(RewardError, name):
        by_name = _is_called_by_name(reward_fn)
        returned = reward_fn(task_info=task, action=action) if by_name else reward_fn(task, action)
    return _reward_output(returned, name)


def _is_called_by_name(reward_fn: Judge) -> bool:
    """Return whether the function has the names by which environments of the rLLM framework pass the arguments."""
    try:
        parameters = inspect.signature(reward_fn).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    found = [parameters[name] for name in ("task_info", "action") if name in parameters]
    return len(found) == 2 and all(item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY) for item in found)


def _reward_output(returned: object, name: str) -> RewardOutput:
    if isinstance(returned, RewardOutput):
        return RewardOutput(checked_reward(returned.reward, name), returned.metadata, returned.is_correct)
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        verdict = _reward_output(returned[0], name)
        return RewardOutput(verdict.reward, {**verdict.metadata, **returned[1]}, verdict.is_correct)
    return RewardOutput(checked_reward(returned, name))


def checked_reward(value: object, name: str, error: type[RolloutError] = RewardError) -> float | None:
    """Return a reward as a finite float, or `None` if it is unscored.

    Raises:
        RolloutError: of the type `error`, naming the function, if it is not a finite number.
    """
    if value is None or isinstance(value, Unscored):
        return None
    if inspect.iscoroutine(value):
        value.close()
        raise error(f"{name} is a coroutine function; use an ordinary function, which is called in a thread")
    if not is_number(value):
        raise error(f"{name} returned {shown(value)} of type {type(value).__name__}: return {ACCEPTED}")
    try:
        reward = float(value)
    except OverflowError:  # an integer beyond all floats
        reward = math.inf
    if not math.isfinite(reward):
        raise error(f"{name} returned the reward {reward!r}: return a finite number, or None for 'not scored'")
    return reward


def is_number(value: object) -> TypeGuard[float]:
    """Return whether this is a scalar number of Python, NumPy or torch."""
    if isinstance(value, bool | int | float):
        return True
    return getattr(value, "shape", None) == () and hasattr(value, "item") and isinstance(value.item(), int | float)


_ADDRESS_PARAMETERS = ("base_url", "session_url")
"""Parameters that give an agent the address of its model."""


def with_reward(agent: Callable[..., object], reward: Judge) -> Callable[..., Any]:
    """Return a function that runs the agent and scores its answer with `reward(task, answer)`.

    The reward sees the task as it was passed in, without changes made by the agent. It may return anything that
    `as_reward_output` accepts; finite numbers in its metadata become metrics.

    Raises:
        ConfigError: if the reward cannot be called with a task and an answer, or is a coroutine function.
    """
    check_reward(reward)

    @functools.wraps(agent)
    def run(**task: object) -> Episode | Awaitable[Episode]:
        answer = agent(**snapshot(task))
        return score_later(answer, task) if inspect.isawaitable(answer) else _episode(reward, task, answer)

    async def score_later(answer: Awaitable[object], task: JSONMapping) -> Episode:
        judge = functools.partial(_episode, reward, task, await answer)
        return await in_thread(judge, name=f"reward {_name_of(reward)}")

    if not inspect.iscoroutinefunction(agent):
        return run

    @functools.wraps(agent)
    async def run_async(**task: object) -> Episode:
        return await score_later(agent(**snapshot(task)), task)

    return run_async


def check_reward(reward: Judge) -> None:
    """Check that a reward function can be called with a task and an answer.

    Raises:
        ConfigError: if it cannot, or is a coroutine function.
    """
    name = _name_of(reward)
    if inspect.iscoroutinefunction(reward):
        raise ConfigError(f"reward {name} is a coroutine function; use an ordinary function, which runs in a thread")
    try:
        inspect.signature(reward).bind({}, "")
    except TypeError as error:
        raise ConfigError(
            f"reward {name}: it must take a task and an answer, as in `def reward(task, answer)`; {error}"
        ) from error
    except ValueError:  # a builtin without a signature
        return


def _name_of(reward: Judge) -> str:
    return str(getattr(reward, "__qualname__", repr(reward)))


def _episode(reward: Judge, given: JSONMapping, answer: object) -> Episode:
    task = {name: value for name, value in given.items() if name not in _ADDRESS_PARAMETERS}
    verdict = as_reward_output(reward, task, answer)
    right = verdict.reward is not None and verdict.reward >= 1.0
    return Episode(
        trajectories=[Trajectory(reward=verdict.reward, output=answer)],
        is_correct=right if verdict.is_correct is None else verdict.is_correct,
        metrics={
            name: float(value)
            for name, value in verdict.metadata.items()
            if is_number(value) and -MAX_REWARD <= value <= MAX_REWARD
        },
        info={"unscored": f"reward {_name_of(reward)} returned None"} if verdict.reward is None else {},
    )
