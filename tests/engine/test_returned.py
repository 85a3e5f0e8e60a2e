from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from rllm.engine.returned import check_promise, episode_from
from rllm.errors import AgentError, ConfigError
from rllm.rewards.scoring import with_reward
from rllm.sdk import trajectory
from rllm.types import UNSCORED, Episode, Step, Trajectory, is_scored


@pytest.mark.parametrize(
    ("returned", "reward", "is_correct"),
    [
        (1, 1.0, True),
        (0.5, 0.5, False),
        (True, 1.0, True),
        (False, 0.0, False),
        (-2, -2.0, False),
        (np.float32(0.25), 0.25, False),
        (np.int64(3), 3.0, True),
        (np.bool_(True), 1.0, True),
        (np.array(1.0), 1.0, True),
    ],
)
def test_a_number_is_the_reward_of_one_trajectory(returned: Any, reward: float, is_correct: bool) -> None:
    episode = episode_from(returned, "agent")
    (trajectory,) = episode.trajectories
    assert trajectory.name == "agent"
    assert type(trajectory.reward) is float
    assert trajectory.reward == reward
    assert episode.is_correct is is_correct


@pytest.mark.parametrize("returned", [None, UNSCORED, (UNSCORED, {"turns": 2})])
def test_unscored_is_not_zero(returned: Any) -> None:
    episode = episode_from(returned, "agent")
    assert not is_scored(episode.trajectories[0].reward)
    assert not episode.is_correct


def test_a_reward_with_metrics() -> None:
    episode = episode_from((np.float64(1.0), {"turns": 3, "ok": True}), "agent")
    assert episode.trajectories[0].reward == 1.0
    assert episode.metrics == {"turns": 3.0, "ok": 1.0}
    assert episode_from((None, {"turns": 1}), "agent").trajectories[0].final_reward() is None


def test_trajectories_keep_their_rewards() -> None:
    solver = Trajectory(name="solver", steps=[Step(reward=np.float32(0.5))])
    judge = Trajectory(name="judge", reward=1)
    episode = episode_from([solver, judge], "agent")
    assert episode.trajectories == [solver, judge]
    assert [item.final_reward() for item in episode.trajectories] == [0.5, 1.0]
    assert type(solver.steps[0].reward) is float
    assert episode.is_correct  # the last one says
    assert episode_from([*episode.trajectories, Trajectory(name="critic")], "agent").is_correct  # that has a reward
    assert not episode_from(solver, "agent").is_correct


def test_an_episode_is_taken_as_it_is() -> None:
    mine = Episode(is_correct=True, metrics={"x": 1.0})
    episode = episode_from(mine, "agent")
    assert episode is mine
    assert len(episode.trajectories) == 1


@pytest.mark.parametrize(
    "returned",
    [
        *({"reward": 1.0}, [], [1.0], [Trajectory(), 1.0], object(), (1.0, 2.0), np.array([1.0, 2.0])),
        *(1j, np.complex128(1j), np.datetime64("2026-01-01"), np.array(None), np.bytes_(b"1")),
    ],
)
def test_anything_else_is_refused_with_the_list_of_what_is_accepted(returned: Any) -> None:
    with pytest.raises(AgentError, match=f"my_agent returned .* of type {type(returned).__name__}: return a number, "):
        episode_from(returned, "my_agent")


@pytest.mark.parametrize(
    "returned", [math.nan, math.inf, np.float32("nan"), Trajectory(reward=math.nan), (1.0, {"x": math.inf})]
)
def test_numbers_must_be_finite(returned: Any) -> None:
    with pytest.raises(AgentError, match="use a finite number"):
        episode_from(returned, "agent")


def test_a_step_reward_of_a_wrong_type_is_named() -> None:
    with pytest.raises(AgentError, match="reward on trajectory 'solver'"):
        episode_from(Trajectory(name="solver", steps=[Step(reward="1")]), "agent")  # type: ignore[arg-type]


@pytest.mark.parametrize("reward", [10**400, float("inf"), float("nan")])
def test_a_reward_beyond_all_numbers_is_the_agents_error(reward: float) -> None:
    with pytest.raises(AgentError, match="use a finite number"):
        episode_from(reward, "agent")


@pytest.mark.parametrize("reward", [1e308, -1e31])
def test_a_reward_beyond_all_sums_is_told_how_large_it_may_be(reward: float) -> None:
    with pytest.raises(AgentError, match=re.escape(f"the reward {reward!r}: use a number from -1e+30 to 1e+30")):
        episode_from(reward, "agent")


HOW = "nothing scores: name the function that judges it .--reward FILE.py:function, .* or return the reward itself"


def test_text_is_no_reward() -> None:
    with pytest.raises(AgentError, match=f"my_agent returned '4', which {HOW}"):
        episode_from("4", "my_agent")


def says(question: str) -> str:
    return question


async def says_later(question: str) -> str:
    return question


says_later.__annotations__["return"] = str  # as where annotations are not put off


@pytest.mark.parametrize("function", [says, says_later])
def test_a_function_that_promises_text_is_refused_before_it_runs(function: Any) -> None:
    with pytest.raises(ConfigError, match=f"my_agent returns text .-> str., which {HOW}"):
        check_promise(function, "my_agent")


def test_what_a_decorator_makes_of_text_may_be_scored() -> None:
    for function in (with_reward(says, lambda task, answer: 1.0), trajectory(says), lambda question: "4", print):
        check_promise(function, "my_agent")
