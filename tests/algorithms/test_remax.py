from __future__ import annotations

import pytest

from rllm.algorithms.reinforce import ReMax
from rllm.errors import ConfigError
from rllm.types import Trajectory

from .values import group_of

GREEDY = Trajectory(reward=0.25, trainable=False)


def test_rewards_are_compared_with_the_greedy_rollout() -> None:
    group = group_of(1.0, 0.0, references=[GREEDY])
    assert ReMax().credit(group) == [0.75, -0.25]
    assert ReMax().baseline(group) == 0.25


def test_one_rollout_is_enough() -> None:
    assert ReMax().credit(group_of(1.0, references=[GREEDY])) == [0.75]
    assert ReMax.min_group_size == 1


def test_penalties_are_subtracted() -> None:
    assert ReMax().credit(group_of(1.0, references=[GREEDY], penalties=[0.5])) == [0.25]


@pytest.mark.parametrize("references", [[], [Trajectory()]], ids=["none", "unscored"])
def test_missing_greedy_rollout_error_names_the_remedy(references: list[Trajectory]) -> None:
    with pytest.raises(ConfigError, match=r"group 'task/agent' has no scored greedy rollout .*algorithm\.name=rloo"):
        ReMax().credit(group_of(1.0, group_id="task/agent", references=references))


def test_steps_have_no_greedy_counterpart() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.level='step': a greedy rollout has other steps"):
        ReMax(level="step")
