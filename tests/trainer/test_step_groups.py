"""GiGPO: credit by trajectory, and by step among steps with the same observation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.gigpo import GiGPO
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.ppo import PPO
from rllm.algorithms.reinforce import RLOO, Reinforce
from rllm.errors import ConfigError
from rllm.trainer.credit import Assembled, assemble
from rllm.types import Episode, Step, Trajectory

GIGPO = GiGPO(normalize_std=False, gamma=0.5)


def episode(index: int, reward: float, *observations: object) -> Episode:
    """Return an episode of steps with these observations and one token each, whose trajectory has the reward."""
    steps = [
        Step(prompt_ids=[1, 100 * index + place], response_ids=[5], logprobs=[-1.0], observation=seen)
        for place, seen in enumerate(observations)
    ]
    return Episode(
        task_id="task", index=index, session_id=str(index), trajectories=[Trajectory(steps=steps, reward=reward)]
    )


def assembled(episodes: Sequence[Episode], algorithm: GRPO = GIGPO) -> Assembled:
    return assemble(episodes, algorithm, step=1, temperature=1.0)


def advantages(episodes: Sequence[Episode], algorithm: GRPO = GIGPO) -> list[list[float]]:
    assembled(episodes, algorithm)
    return [[step.advantage for step in item.trajectories[0].steps] for item in episodes]  # type: ignore[misc]


def test_advantages_match_hand_computed_values() -> None:
    # Returns: 0.5, 1 | 0, 0, 0 | 0. At the door 0.5, 0 and 0, with mean 1/6; in the hall 1 and 0; the cellar has one.
    episodes = [episode(0, 1.0, "door", "hall"), episode(1, 0.0, "door", "cellar", "door"), episode(2, 0.0, "hall")]
    first, second, third = advantages(episodes)
    assert first == pytest.approx([2 / 3 + 1 / 3, 2 / 3 + 1 / 2])
    assert second == pytest.approx([-1 / 3 - 1 / 6, -1 / 3, -1 / 3 - 1 / 6])
    assert third == pytest.approx([-1 / 3 - 1 / 2])


def test_tokens_are_trained_with_the_advantage_of_their_step() -> None:
    found = assembled([episode(0, 1.0, "a", "b"), episode(1, 0.0, "a", "b")])
    # 0.5 from the trajectory; 0.25 at a and 0.5 at b.
    assert found.batch.advantages.tolist() == pytest.approx([0.75, 1.0, -0.75, -1.0])
    assert [credit.advantage for credit in found.credits] == pytest.approx([0.75, 1.0, -0.75, -1.0])


def test_equal_rewards_still_prefer_fewer_steps() -> None:
    episodes = [episode(0, 1.0, "a"), episode(1, 1.0, "a", "b")]
    found = assembled(episodes)
    assert found.dropped == {}
    assert found.batch.advantages.tolist() == pytest.approx([0.25, -0.25])  # b has no sibling, and no advantage


def test_last_message_of_the_prompt_replaces_a_missing_observation() -> None:
    episodes = [episode(0, 1.0, None), episode(1, 0.0, None), episode(2, 0.0, None)]
    for item, content in zip(episodes, ("x", "x", "y"), strict=True):
        question = [{"role": "system", "content": str(item.index)}, {"role": "user", "content": content}]
        item.trajectories[0].steps[0].chat_completions = [*question, {"role": "assistant", "content": "z"}]
    assert advantages(episodes) == [pytest.approx([2 / 3 + 1 / 2]), pytest.approx([-1 / 3 - 1 / 2]), [-1 / 3]]


REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=5)


@given(REWARDS)
def test_distinct_observations_give_grpo(rewards: list[float]) -> None:
    def episodes() -> list[Episode]:
        return [episode(index, reward, (index, 0), (index, 1)) for index, reward in enumerate(rewards)]

    one, other = (assembled(episodes(), algorithm).batch for algorithm in (GiGPO(), GRPO()))
    assert torch.equal(one.advantages, other.advantages)


@given(REWARDS)
def test_single_step_is_compared_twice(rewards: list[float]) -> None:
    one = advantages([episode(index, reward, "a") for index, reward in enumerate(rewards)])
    other = advantages([episode(index, reward, "a") for index, reward in enumerate(rewards)], GRPO(normalize_std=False))
    assert one == [pytest.approx([2 * value]) for (value,) in other]


def test_other_group_algorithms_support_step_groups_and_the_rest_reject_them() -> None:
    found = assemble(
        [episode(0, 1.0, "a"), episode(1, 0.0, "a")], RLOO(step_coef=0.5, gamma=0.9), step=1, temperature=1.0
    )
    assert found.batch.advantages.tolist() == pytest.approx([1.5, -1.5])
    for kind in (Reinforce, PPO):
        with pytest.raises(
            ConfigError, match=r"algorithm\.step_coef=1\.0: it adds to a comparison of whole trajectories"
        ):
            kind(step_coef=1.0)
    with pytest.raises(ConfigError, match=r"algorithm\.step_coef=1\.0: it adds to a comparison of whole trajectories"):
        GRPO(step_coef=1.0, level="step")
    with pytest.raises(ConfigError, match=r"algorithm\.step_coef=0\.0: use a number above 0"):
        GiGPO(step_coef=0.0)
