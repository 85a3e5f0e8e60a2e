"""Rewards of whole groups, and weights of named parts, in a runner."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner
from rllm.engine.scoring import Scoring
from rllm.errors import AgentError
from rllm.rewards.scoring import AddedReward, group_reward
from rllm.types import Episode, Step, Trajectory


class Answering:
    """Rollouts that answer with a text of their task's list; an `AgentError` in it is raised."""

    async def rollout(self, attempt: RolloutRequest) -> Episode:
        answer = attempt.task["said"][attempt.index]
        if isinstance(answer, AgentError):
            raise answer
        paths = answer if isinstance(answer, list) else [Trajectory(output=answer)]
        return Episode(task=attempt.task, task_id=attempt.task_id, index=attempt.index, trajectories=paths)


async def run(scoring: Scoring, **expected: list[Any]) -> tuple[dict[str, Episode], list[str]]:
    """Return the episodes by id, and the ids in the order in which they were reported."""
    attempts = [
        RolloutRequest(task={"id": name, "said": texts}, task_id=name, index=index)
        for index in range(max(map(len, expected.values())))
        for name, texts in expected.items()
        if index < len(texts)
    ]
    reported: list[str] = []
    runner = RolloutRunner(Answering(), max_concurrent=2, num_retries=0, scoring=scoring)
    episodes = await runner.run(attempts, on_episode=lambda episode: reported.append(episode.id))
    return {episode.id: episode for episode in episodes}, reported


@group_reward
def shortest(task: dict[str, Any], answers: list[str]) -> list[float]:
    if "crash" in answers:
        raise KeyError(task["id"])
    return [float(len(answer) == min(map(len, answers))) for answer in answers]


async def test_group_is_scored_when_its_last_rollout_has_ended() -> None:
    episodes, reported = await run(Scoring(group_reward=shortest), a=["fig", "lime"], b=["kiwi", "pear", "plum"])
    groups = [["a:0", "a:1"], ["b:0", "b:1", "b:2"]]
    assert reported in (groups[0] + groups[1], groups[1] + groups[0]), "each group is reported as a whole"
    assert [episode.trajectories[0].reward for episode in episodes.values()] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert [episodes[name].is_correct for name in ("a:0", "a:1")] == [True, False]


async def test_failed_rollouts_are_not_compared() -> None:
    episodes, _ = await run(Scoring(group_reward=shortest), a=[AgentError("no"), "lime"])
    assert (episodes["a:0"].failed, episodes["a:1"].trajectories[0].reward) == (True, 1.0)


async def test_error_in_a_group_reward_fails_only_its_group() -> None:
    episodes, _ = await run(Scoring(group_reward=shortest), a=["crash", "lime"], b=["fig", "lime"])
    errors = [episodes[f"a:{index}"].info["error"] for index in (0, 1)]
    assert {error["type"] for error in errors} == {"RewardError"}
    assert "shortest for task 'a' raised KeyError" in errors[0]["message"]
    assert [episodes[f"b:{index}"].trajectories[0].reward for index in (0, 1)] == [1.0, 0.0]


async def test_roles_are_compared_among_themselves_without_opponents() -> None:
    def team(solver: str, judge: str) -> list[Trajectory]:
        opponent = Trajectory(name="opponent", output="x", reward=0.25, trainable=False)
        return [Trajectory(name="solver", output=solver), Trajectory(name="judge", output=judge), opponent]

    episodes, _ = await run(Scoring(group_reward=shortest), a=[team("fig", "plum"), team("lime", "yes")])
    assert [[path.reward for path in item.trajectories] for item in episodes.values()] == [[1, 0, 0.25], [0, 1, 0.25]]


async def test_group_reward_replaces_step_rewards() -> None:
    path = Trajectory(steps=[Step(model_response="fig", reward=5.0)])
    episodes, _ = await run(Scoring(group_reward=shortest), a=[[path]])
    assert episodes["a:0"].trajectories[0].final_reward() == 1.0
    assert path.steps[0].reward is None


async def test_named_parts_are_weighted() -> None:
    parts = {"right": 1.0, "short": 0.5}
    plain = Trajectory(reward=1.5, reward_parts=parts)
    played = Trajectory(reward=2.5, reward_parts=parts, steps=[Step(reward=1.0), Step(reward=1.5)])
    unscored = Trajectory(reward=None, reward_parts={"right": 1.0})
    await run(Scoring(weights={"short": 0.2}), a=[[plain], [played], [unscored]])
    assert math.isclose(plain.final_reward() or 0.0, 1.1)
    assert [step.reward for step in played.steps] == [1.0, 1.1]
    assert math.isclose(played.final_reward() or 0.0, 2.1), "the earlier step's reward is included"
    assert unscored.final_reward() is None


async def test_reward_is_added_to_that_of_an_environment() -> None:
    def brief(task: dict[str, Any], answer: str) -> dict[str, float]:
        return {"brief": 1.0 / len(answer)}

    def played(answer: str, reward: float | None) -> list[Trajectory]:
        return [Trajectory(output=answer, steps=[Step(reward=reward)])]

    said = [played("fig?", 1.0), played("lime", 0.5), played("", 1.0), played("kiwi", None)]
    episodes, _ = await run(Scoring(group_reward=AddedReward(brief), weights={"brief": 2.0}), a=said)
    assert [episode.trajectories[0].final_reward() for episode in episodes.values()] == [1.5, 1.0, None, None]
    assert [episode.is_correct for episode in episodes.values()] == [True, False, True, False]
    assert [path.reward_parts for episode in episodes.values() for path in episode.trajectories][:2] == [
        {"env": 1.0, "brief": 0.25},
        {"env": 0.5, "brief": 0.25},
    ]
    assert "raised ZeroDivisionError" in episodes["a:2"].info["unscored"], "its siblings are not affected"
    assert "the environment gave no reward" in episodes["a:3"].info["unscored"]
    compared, _ = await run(Scoring(group_reward=AddedReward(shortest)), a=[played("fig", 0.5), played("lime", 0.5)])
    assert [episode.trajectories[0].final_reward() for episode in compared.values()] == [1.5, 0.5]


@pytest.mark.parametrize("size", [1, 3])
async def test_group_reward_that_times_out_fails_its_group(size: int) -> None:
    @group_reward
    async def endless(task: object, answers: list[str]) -> None:
        await asyncio.Event().wait()

    episodes, _ = await run(Scoring(group_reward=endless, timeout_s=0.01), a=["fig"] * size)
    assert all("did not finish within 0.01 s" in item.info["error"]["message"] for item in episodes.values())


async def test_weight_without_a_part_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    scoring = Scoring(weights={"shrot": 0.2, "right": 1.0})
    for _ in range(2):
        await run(scoring, a=[[Trajectory(reward=1.5, reward_parts={"right": 1.0, "short": 0.5})]])
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("reward.weights.shrot has had no effect")
    assert "did you mean 'short'?" in warning
