"""An agent that returns its answer, and a reward that judges it, as one function that returns its reward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from rllm._runtime.threads import in_thread
from rllm.capture.snapshot import snapshot
from rllm.errors import ConfigError
from rllm.rewards.scoring import MAX_REWARD, as_reward_output, is_number
from rllm.types import Episode, Trajectory

_NOT_OF_TASK = ("base_url", "session_url")
"""Parameters by which an agent is told where its model is."""


def judged(agent: Callable[..., Any], reward: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The agent, returning what `reward(task, answer)` says of its answer; `task` has the fields that it was called with.

    What the agent does to those is not the reward's to see. The verdict may be whatever `as_reward_output` takes; finite numbers
    among its metadata become metrics.

    Raises:
        ConfigError: if the reward cannot be called with a task and an answer, or is a coroutine function.
    """
    check_reward(reward)
    if inspect.iscoroutinefunction(agent):

        @functools.wraps(agent)
        async def judged_async(**task: Any) -> Episode:
            return await _judged_later(agent(**snapshot(task)), reward, task)

        return judged_async

    @functools.wraps(agent)
    def judged_sync(**task: Any) -> Episode | Coroutine[Any, Any, Episode]:
        answer = agent(**snapshot(task))
        return _judged_later(answer, reward, task) if inspect.isawaitable(answer) else _episode(reward, task, answer)

    return judged_sync


def check_reward(reward: Callable[..., Any]) -> None:
    """
    Raises:
        ConfigError: if it cannot be called with a task and an answer, or is a coroutine function.
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
    except ValueError:  # a builtin that says nothing of its parameters
        return


async def _judged_later(answer: Awaitable[Any], reward: Callable[[Any, Any], Any], task: Mapping[str, Any]) -> Episode:
    judge = functools.partial(_episode, reward, task, await answer)
    return await in_thread(judge, name=f"reward {getattr(reward, '__qualname__', repr(reward))}")


def _episode(reward: Callable[[Any, Any], Any], given: Mapping[str, Any], answer: Any) -> Episode:
    task = {name: value for name, value in given.items() if name not in _NOT_OF_TASK}
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
