from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.base import Algorithm
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.reinforce_plus_plus import ReinforcePlusPlusBaseline
from rllm.algorithms.remax import ReMax
from rllm.algorithms.rloo import RLOO
from rllm.errors import ConfigError
from rllm.trainer.roles import Role
from rllm.trainer.shares import Sample, Share, credit, discounted, grouped, rewards_by_step, shares_of
from rllm.types import UNSCORED, Episode, Step, Trajectory, TrajectoryGroup

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


def shares(*rewards: float, group_id: str = "g") -> list[Share]:
    return [Share(trajectory=path(reward=reward), group_id=group_id) for reward in rewards]


def test_each_reward_and_the_discounted_ones_after_it() -> None:
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
        "the trajectory's goes to the last step",
        "each its own",
        "unscored steps earn nothing",
        "the steps' own go before the trajectory's",
        "silent steps pass theirs back",
        "or on, if none came before",
        "the last that spoke has the trajectory's",
        "nobody spoke",
        "a reward of zero is one",
    ],
)
def test_what_each_step_earned(trajectory: Trajectory, earned: list[float]) -> None:
    assert rewards_by_step(trajectory) == earned


REWARDS = st.one_of(st.just(UNSCORED), st.integers(-8, 8).map(lambda number: number / 4))


@given(st.lists(st.tuples(REWARDS, st.integers(0, 2)), max_size=6), REWARDS)
def test_no_reward_gets_lost(steps: list[tuple[float, int]], reward: float) -> None:
    trajectory = path(*[step(own, num_tokens=size) for own, size in steps], reward=reward)
    spoke = [own for own, size in steps if size]
    earned = rewards_by_step(trajectory)
    assert len(earned) == len(spoke)
    by_steps = any(not isinstance(own, type(UNSCORED)) for own, _ in steps)
    if spoke:
        assert sum(earned) == (sum(own for own, _ in steps) if by_steps else reward)


def test_a_trajectory_is_one_share() -> None:
    trajectory = path(step(), step(), reward=1.0)
    (share,) = shares_of(sample(trajectory), "trajectory", 0.5)
    assert share.trajectory is trajectory
    assert share.group_id == "task/agent"


def test_steps_are_shares_by_their_place_with_what_came_from_there_on() -> None:
    first, second, third = step(1.0), step(2.0), step(4.0)
    found = shares_of(sample(path(first, second, third)), "step", 0.5)
    assert [share.steps for share in found] == [[first], [second], [third]]
    assert [share.trajectory.reward for share in found] == [3.0, 4.0, 4.0]
    assert [share.group_id for share in found] == ["task/agent/0", "task/agent/1", "task/agent/2"]


def test_a_silent_step_has_no_place() -> None:
    first, last = step(1.0), step(2.0)
    found = shares_of(sample(path(first, silent(4.0), last)), "step", 1.0)
    assert [(share.steps, share.trajectory.reward) for share in found] == [([first], 7.0), ([last], 2.0)]
    assert found[1].group_id == "task/agent/1"


def test_groups_are_compared_each_with_itself() -> None:
    groups = grouped([*shares(1.0, 0.0, group_id="a"), *shares(5.0, 3.0, group_id="b")])
    credit(groups, {}, MEAN_ONLY)
    assert [share.advantage for members in groups.values() for share in members] == [0.5, -0.5, 1.0, -1.0]
    assert [members[0].baseline for members in groups.values()] == [0.5, 4.0]


def test_settings_of_an_algorithm_may_be_lists() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(GRPO):
        bounds: list[float] = field(default_factory=list)

    members = shares(1.0, 0.0)
    credit({"g": members}, {}, Mine(normalize_std=False, bounds=[0.5]))
    assert [share.advantage for share in members] == [0.5, -0.5]


def test_roles_with_equal_estimators_are_measured_together() -> None:
    groups = {"a": shares(1.0, 0.0, group_id="a"), "b": shares(4.0, 0.0, group_id="b")}
    for name, members in groups.items():
        for share in members:
            share.trajectory.name = name
            share.trajectory.steps = [step()]
    roles = {name: Role(estimator=ReinforcePlusPlusBaseline()) for name in groups}
    credit(groups, {}, MEAN_ONLY, roles)
    # Distances 0.5, -0.5, 2 and -2 have mean 0 and deviation sqrt(8.5 / 4).
    found = [share.advantage for members in groups.values() for share in members]
    assert found == pytest.approx([value / (8.5 / 4) ** 0.5 for value in (0.5, -0.5, 2.0, -2.0)])


def test_penalties_are_taken_off_before_rewards_are_compared() -> None:
    members = shares(1.0, 1.0)
    members[0].penalty = 0.5
    credit({"g": members}, {}, RLOO())
    assert [share.advantage for share in members] == [-0.5, 0.5]


def test_who_is_alone_gets_no_advantage() -> None:
    (only,) = shares(1.0)
    credit({"g": [only]}, {}, MEAN_ONLY)
    assert (only.advantage, only.dropped) == (0.0, "too_few_siblings")


def test_a_group_whose_greedy_rollout_failed_is_left_out_and_the_others_are_not() -> None:
    groups = {"a": shares(1.0, 0.0), "b": shares(1.0, 0.0)}
    credit(groups, {"a": [path(reward=0.25, trainable=False)]}, ReMax())
    assert [share.advantage for share in groups["a"]] == [0.75, -0.25]
    assert [share.dropped for share in groups["b"]] == ["no_greedy_rollout"] * 2


@pytest.mark.parametrize(
    ("algorithm", "dropped"),
    [
        (MEAN_ONLY, "zero_variance"),
        (GRPO(kl_coef=0.1, kl_in="reward"), "zero_variance"),
        (GRPO(kl_coef=0.1), None),
        (GRPO(entropy_coef=0.1), None),
    ],
)
def test_equal_rewards_teach_nothing_unless_the_loss_has_more_in_it(algorithm: Algorithm, dropped: str | None) -> None:
    members = shares(1.0, 1.0)
    credit({"g": members}, {}, algorithm)
    assert [(share.advantage, share.dropped) for share in members] == [(0.0, dropped)] * 2


@pytest.mark.parametrize("advantages", [[1.0], [1.0, float("nan")], [1.0, 2.0, 3.0]])
def test_an_algorithm_that_gives_no_number_for_each_is_named(advantages: list[float]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(Algorithm):
        def credit(self, group: TrajectoryGroup) -> list[float]:
            return advantages

    with pytest.raises(ConfigError, match=r"Mine gave the rewards \[1.0, 0.0\] of group 'g' the advantages"):
        credit({"g": shares(1.0, 0.0)}, {}, Mine())
