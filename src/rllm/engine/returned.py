"""What an agent function may return, as an episode: the table of accepted types in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm.engine.checked import check_episode, check_trajectories, checked_metrics, checked_reward_of
from rllm.errors import AgentError, ConfigError, shown
from rllm.rewards.scoring import is_number
from rllm.types import Episode, Trajectory, is_scored

ACCEPTED = (
    "a number, (reward, {metric: number}), a Trajectory, a list of Trajectory, an Episode, or None for 'not scored'"
)

HOW_TO_SCORE = (
    "name the function that judges it (--reward FILE.py:function, or rllm.rewards.scoring.judged in Python), or return the "
    "reward itself"
)


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
        AgentError: if the value is none of the accepted ones, or a field of it is not what it should be.
    """
    if isinstance(returned, Episode):
        returned.trajectories = returned.trajectories or [Trajectory()]
        check_episode(returned, agent)
        return returned
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        episode = episode_from(returned[0], agent)
        episode.metrics.update(checked_metrics(returned[1], agent))
        return episode
    trajectories = _trajectories_from(returned, agent)
    check_trajectories(trajectories, agent)
    scores = [reward for path in trajectories if (reward := path.final_reward()) is not None]
    return Episode(trajectories=trajectories, is_correct=bool(scores) and scores[-1] >= 1.0)


def _trajectories_from(returned: Any, agent: str) -> list[Trajectory]:
    if not is_scored(returned):
        return [Trajectory()]
    if isinstance(returned, Trajectory):
        return [returned]
    if isinstance(returned, list | tuple) and returned and all(isinstance(item, Trajectory) for item in returned):
        return list(returned)
    if isinstance(returned, str):
        raise AgentError(f"{agent} returned {shown(returned)}, which nothing scores: {HOW_TO_SCORE}")
    if not is_number(returned):
        raise AgentError(f"{agent} returned {shown(returned)} of type {type(returned).__name__}: return {ACCEPTED}")
    return [Trajectory(reward=checked_reward_of(returned, "reward", agent))]
