"""What an agent function may return, as an episode: the table of accepted types in one place."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from rllm.errors import AgentError, ConfigError
from rllm.types import Episode, Step, Trajectory, is_scored

ACCEPTED = (
    "a number, (reward, {metric: number}), a Trajectory, a list of Trajectory, an Episode, or None for 'not scored'"
)

HOW_TO_SCORE = (
    "name the function that judges it (--reward FILE.py:function, or rllm.rewards.judged.judged in Python), or return the "
    "reward itself"
)

MAX_REWARD = 1e30
"""Sums and squares of a group's rewards must stay finite in float32's range of exponents."""


def check_promise(function: Any, agent: str) -> None:
    """Refuse a function whose annotation says that it returns text. One with a decorator may return something else.

    Raises:
        ConfigError: naming the ways to give a reward.
    """
    promised = getattr(function, "__annotations__", {}).get("return")
    if promised in (str, "str") and not hasattr(function, "__wrapped__"):
        raise ConfigError(f"{agent} returns text (-> str), which nothing scores: {HOW_TO_SCORE}")


def episode_from(returned: Any, agent: str) -> Episode:
    """The episode that a function's return value stands for; its trajectories may not have their steps yet.

    Raises:
        AgentError: if the value is none of the accepted ones, or a reward is not finite.
    """
    if isinstance(returned, Episode):
        episode = returned
        episode.trajectories = episode.trajectories or [Trajectory()]
        check_rewards(episode.trajectories, agent)
        return episode
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        episode = episode_from(returned[0], agent)
        episode.metrics.update(
            {str(name): _number(value, f"metric {name!r}", agent) for name, value in returned[1].items()}
        )
        return episode
    trajectories = _trajectories_from(returned, agent)
    check_rewards(trajectories, agent)
    reward = trajectories[-1].final_reward()
    return Episode(trajectories=trajectories, is_correct=reward is not None and reward >= 1.0)


def _trajectories_from(returned: Any, agent: str) -> list[Trajectory]:
    if returned is None:
        return [Trajectory()]
    if isinstance(returned, Trajectory):
        return [returned]
    if isinstance(returned, list | tuple) and returned and all(isinstance(item, Trajectory) for item in returned):
        return list(returned)
    if isinstance(returned, str):
        raise AgentError(f"{agent} returned {reprlib.repr(returned)}, which nothing scores: {HOW_TO_SCORE}")
    if not is_number(returned):
        raise AgentError(
            f"{agent} returned {reprlib.repr(returned)} of type {type(returned).__name__}: return {ACCEPTED}"
        )
    return [Trajectory(reward=_number(returned, "reward", agent))]


def is_number(value: Any) -> bool:
    """Whether this is a scalar number: Python's, NumPy's or a tensor of one element."""
    if isinstance(value, bool | int | float):
        return True
    return hasattr(value, "item") and getattr(value, "shape", None) == () and not isinstance(value.item(), str)


def check_rewards(trajectories: list[Trajectory], agent: str) -> None:
    """Make every reward that was set a plain finite float.

    Raises:
        AgentError: if one is not finite, or no number.
    """
    for trajectory in trajectories:
        scored: list[Trajectory | Step] = [trajectory, *trajectory.steps]
        for item in scored:
            if is_scored(item.reward):
                item.reward = _number(item.reward, f"reward on trajectory {trajectory.name!r}", agent)


def _float(value: Any) -> float:
    try:
        return float(value) if is_number(value) else math.nan
    except OverflowError:  # an integer beyond all floats
        return math.inf


def _number(value: Any, what: str, agent: str) -> float:
    number = _float(value)
    if not abs(number) <= MAX_REWARD:
        raise AgentError(
            f"{agent} returned the {what} {reprlib.repr(value)}: use a finite number, or None for 'not scored'"
        )
    return number
