import asyncio
import inspect
import math
from typing import Any

import numpy as np
import pytest

from rllm.errors import ConfigError, RewardError
from rllm.rewards.reward_types import RewardOutput
from rllm.rewards.scoring import group_reward, with_deadline, with_reward
from rllm.types import Trajectory, is_scored


def shout(word: str, base_url: str = "") -> str:
    return word.upper()


async def shout_later(word: str) -> str:
    return word.upper()


def is_fig(task: dict[str, str], answer: str) -> float:
    assert set(task) == {"word"}
    return float(answer == "FIG")


def test_answer_of_the_agent_is_scored_with_its_task() -> None:
    right = with_reward(shout, is_fig)(word="fig", base_url="http://here")
    assert (right.trajectories[0].reward, right.trajectories[0].output, right.is_correct) == (1.0, "FIG", True)
    wrong = asyncio.run(with_reward(shout_later, is_fig)(word="kiwi"))
    assert (wrong.trajectories[0].reward, wrong.is_correct) == (0.0, False)
    wrapped = asyncio.run(with_reward(lambda word: shout_later(word), is_fig)(word="fig"))
    assert wrapped.trajectories[0].output == "FIG", "a function that returns an awaitable counts as async"


def test_wrapper_has_the_name_and_parameters_of_the_agent() -> None:
    function = with_reward(shout, is_fig)
    assert function.__name__ == "shout"
    assert list(inspect.signature(function).parameters) == ["word", "base_url"]


def test_reward_output_sets_correctness_and_metrics() -> None:
    def strict(task: object, answer: str) -> RewardOutput:
        return RewardOutput(0.5, {"length": len(answer), "why": "short"}, is_correct=True)

    episode = with_reward(shout, strict)(word="fig")
    assert (episode.metrics, episode.is_correct) == ({"length": 3.0}, True)
    assert not is_scored(with_reward(shout, lambda task, answer: None)(word="fig").trajectories[0].reward)


def test_non_finite_metrics_are_dropped() -> None:
    def odd(task: object, answer: str) -> RewardOutput:
        return RewardOutput(1.0, {"f1": math.nan, "count": 10**400, "share": np.float32(0.5)})

    assert with_reward(shout, odd)(word="fig").metrics == {"share": 0.5}


async def test_reward_gets_the_task_unchanged_by_the_agent() -> None:
    def use_up(nums: list[int]) -> int:
        return nums.pop() + nums.pop()

    async def use_up_later(nums: list[int]) -> int:
        return use_up(nums)

    def is_sum(task: dict[str, list[int]], answer: int) -> float:
        return float(sum(task["nums"]) == answer)

    assert with_reward(use_up, is_sum)(nums=[1, 2]).is_correct
    assert (await with_reward(use_up_later, is_sum)(nums=[1, 2])).is_correct


def test_error_in_a_reward_function_names_it() -> None:
    def broken(task: object, answer: str) -> float:
        raise KeyError("gold")

    with pytest.raises(RewardError, match="broken raised KeyError: 'gold'"):
        with_reward(shout, broken)(word="fig")


def test_unscored_episode_names_its_reward_function() -> None:
    assert with_reward(shout, lambda task, answer: 1.0)(word="fig").info == {}
    unscored = with_reward(shout, silent)(word="fig")
    assert unscored.trajectories[0].reward is None
    assert unscored.info == {"unscored": "reward silent returned None"}


def silent(task: dict[str, str], answer: str) -> None:
    """Forget to return the reward."""


@pytest.mark.parametrize("agent", [shout, shout_later])
async def test_async_reward_or_one_with_a_deadline_is_awaited(agent: Any) -> None:
    async def later(task: dict[str, str], answer: str) -> float:
        return is_fig(task, answer)

    assert (await with_reward(agent, later)(word="fig")).is_correct
    assert (await with_reward(agent, is_fig, timeout_s=60)(word="fig")).is_correct
    with pytest.raises(RewardError, match="did not finish within"):
        await with_deadline(with_reward(agent, never), 0.01)(word="fig")


async def never(task: dict[str, str], answer: str) -> None:
    await asyncio.Event().wait()


def test_reward_metadata_is_kept() -> None:
    def strict(task: object, answer: str) -> RewardOutput:
        return RewardOutput(0.5, {"why": "short"}, parts={"length": 0.5})

    [path] = with_reward(shout, strict)(word="fig").trajectories
    assert (path.info, path.reward_parts) == ({"verdict": {"why": "short"}}, {"length": 0.5})


async def test_group_reward_is_left_to_the_runner() -> None:
    @group_reward
    def first(task: object, answers: list[str]) -> list[float]:
        return [float(answer == answers[0]) for answer in answers]

    for agent in (shout, shout_later):
        episode = with_reward(agent, first)(word="fig")
        [path] = (await episode if inspect.isawaitable(episode) else episode).trajectories
        assert (path.output, is_scored(path.reward)) == ("FIG", False)
    own = with_reward(lambda word: Trajectory(name="solver", output=word), first)(word="fig")
    assert own.name == "solver", "the agent's own name is kept"


def test_reward_with_other_parameters_is_rejected() -> None:
    with pytest.raises(ConfigError, match="must take a task and an answer"):
        with_reward(shout, lambda answer: 1.0)
    with pytest.raises(ConfigError, match="must take a task and the answers of a group"):
        with_reward(shout, group_reward(lambda answers: [1.0]))
