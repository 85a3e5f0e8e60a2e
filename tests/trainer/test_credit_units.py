from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.base import Algorithm
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.reinforce import RLOO, ReMax
from rllm.errors import ConfigError
from rllm.trainer.credit import CreditUnit, Sample, credited_groups, rewards_by_step, units_of
from rllm.types import UNSCORED, Episode, Step, Trajectory, TrajectoryGroup, discounted

MEAN_ONLY = GRPO(normalize_std=False)


def step(reward: float | None = UNSCORED, *, num_tokens: int = 1) -> Step:
    ids = list(range(num_tokens))
    return Step(prompt_ids=[9], response_ids=ids, logprobs=[-1.0] * num_tokens, reward=reward)  # type: ignore[arg-type]


def silent(reward: float | None = UNSCORED) -> Step:
    return step(reward, num_tokens=0)


def path(*steps: Step, **fields: Any) -> Trajectory:
    return Trajectory(steps=list(steps), **fields)


def sample(trajectory: Trajectory) -> Sample:
    return Sample(episode=Episode(task_id="task", trajectories=[trajectory]), index=0)


def units(*rewards: float, group_id: str = "g") -> list[CreditUnit]:
    return [CreditUnit(trajectory=path(reward=reward), group_id=group_id) for reward in rewards]


def test_return_is_the_reward_plus_discounted_later_rewards() -> None:
    assert discounted([1.0, 2.0, 4.0], 0.5) == [3.0, 4.0, 4.0]
    assert discounted([], 0.5) == []


@pytest.mark.parametrize(
    ("trajectory", "earned"),
    [
        (path(step(), step(), reward=2.0), [0.0, 2.0]),
        (path(step(0.25), step(0.5)), [0.25, 0.5]),
        (path(step(0.25), step()), [0.25, 0.0]),
        (path(step(0.25), step(), reward=9.0), [0.25, 0.0]),
        (path(step(0.25), silent(1.0), step(0.5), silent(2.0), silent(4.0)), [1.25, 6.5]),
        (path(silent(1.0), step(), step(0.5)), [1.0, 0.5]),
        (path(step(), silent(), reward=2.0), [2.0]),
        (path(silent(), reward=2.0), []),
        (path(step(0.0), reward=2.0), [0.0]),
    ],
    ids=[
        "the trajectory's reward goes to the last step",
        "each step has its own reward",
        "unscored steps earn nothing",
        "rewards of steps replace the trajectory's",
        "rewards of steps without tokens go to the previous step",
        "or to the next step, if there is no previous one",
        "the last step with tokens gets the trajectory's reward",
        "no step has tokens",
        "a reward of zero is a reward",
    ],
)
def test_each_step_gets_its_reward(trajectory: Trajectory, earned: list[float]) -> None:
    assert rewards_by_step(trajectory) == earned


REWARDS = st.one_of(st.just(UNSCORED), st.integers(-8, 8).map(lambda number: number / 4))


@given(st.lists(st.tuples(REWARDS, st.integers(0, 2)), max_size=6), REWARDS)
def test_sum_of_rewards_is_kept(steps: list[tuple[float, int]], reward: float) -> None:
    trajectory = path(*[step(own, num_tokens=size) for own, size in steps], reward=reward)
    spoke = [own for own, size in steps if size]
    earned = rewards_by_step(trajectory)
    assert len(earned) == len(spoke)
    by_steps = any(not isinstance(own, type(UNSCORED)) for own, _ in steps)
    if spoke:
        assert sum(earned) == (sum(own for own, _ in steps) if by_steps else reward)


def test_trajectory_is_one_unit() -> None:
    trajectory = path(step(), step(), reward=1.0)
    (unit,) = units_of(sample(trajectory), "trajectory", 0.5)
    assert unit.trajectory is trajectory
    assert unit.group_id == "task/agent"


def test_steps_are_units_with_their_returns() -> None:
    first, second, third = step(1.0), step(2.0), step(4.0)
    found = units_of(sample(path(first, second, third)), "step", 0.5)
    assert [unit.steps for unit in found] == [[first], [second], [third]]
    assert [unit.trajectory.reward for unit in found] == [3.0, 4.0, 4.0]
    assert [unit.group_id for unit in found] == ["task/agent/0", "task/agent/1", "task/agent/2"]


def test_step_without_tokens_has_no_unit() -> None:
    first, last = step(1.0), step(2.0)
    found = units_of(sample(path(first, silent(4.0), last)), "step", 1.0)
    assert [(unit.steps, unit.trajectory.reward) for unit in found] == [([first], 7.0), ([last], 2.0)]
    assert found[1].group_id == "task/agent/1"


def test_groups_are_compared_separately() -> None:
    groups = {"a": units(1.0, 0.0), "b": units(5.0, 3.0)}
    groups = credited_groups(groups, {}, MEAN_ONLY)
    assert [unit.advantage for members in groups.values() for unit in members] == [0.5, -0.5, 1.0, -1.0]
    assert [members[0].baseline for members in groups.values()] == [0.5, 4.0]


def test_algorithm_settings_may_be_lists() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(GRPO):
        bounds: list[float] = field(default_factory=list)

    members = credited_groups({"g": units(1.0, 0.0)}, {}, Mine(normalize_std=False, bounds=[0.5]))["g"]
    assert [unit.advantage for unit in members] == [0.5, -0.5]


def test_penalties_are_applied_before_the_comparison() -> None:
    first, second = units(1.0, 1.0)
    members = credited_groups({"g": [replace(first, penalty=0.5), second]}, {}, RLOO())["g"]
    assert [unit.advantage for unit in members] == [-0.5, 0.5]


def test_unit_without_siblings_gets_no_advantage() -> None:
    [only] = credited_groups({"g": units(1.0)}, {}, MEAN_ONLY)["g"]
    assert (only.advantage, only.dropped) == (0.0, "too_few_siblings")


def test_group_without_its_greedy_rollout_is_dropped() -> None:
    groups = {"a": units(1.0, 0.0), "b": units(1.0, 0.0)}
    groups = credited_groups(groups, {"a": [path(reward=0.25, trainable=False)]}, ReMax())
    assert [unit.advantage for unit in groups["a"]] == [0.75, -0.25]
    assert [unit.dropped for unit in groups["b"]] == ["no_greedy_rollout"] * 2


@pytest.mark.parametrize(
    ("algorithm", "dropped"),
    [
        (MEAN_ONLY, "zero_variance"),
        (GRPO(kl_coef=0.1, kl_in="reward"), "zero_variance"),
        (GRPO(kl_coef=0.1), None),
        (GRPO(entropy_coef=0.1), None),
    ],
)
def test_equal_rewards_are_dropped_unless_the_loss_has_other_terms(algorithm: Algorithm, dropped: str | None) -> None:
    members = credited_groups({"g": units(1.0, 1.0)}, {}, algorithm)["g"]
    assert [(unit.advantage, unit.dropped) for unit in members] == [(0.0, dropped)] * 2


@pytest.mark.parametrize("advantages", [[1.0], [1.0, float("nan")], [1.0, 2.0, 3.0]])
def test_invalid_advantages_name_the_algorithm(advantages: list[float]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(Algorithm):
        def credit(self, group: TrajectoryGroup) -> list[float]:
            return advantages

    with pytest.raises(ConfigError, match=r"Mine .*'g'"):
        credited_groups({"g": units(1.0, 0.0)}, {}, Mine())
