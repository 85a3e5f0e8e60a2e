from math import sqrt

import pytest

from rllm.algorithms.from_config import algorithm_of
from rllm.algorithms.gdpo import GDPO
from rllm.errors import ConfigError
from rllm.trainer.config import load_config
from rllm.types import Trajectory, TrajectoryGroup


def group(*parts: dict[str, float]) -> TrajectoryGroup:
    return TrajectoryGroup(trajectories=[Trajectory(reward=sum(item.values()), reward_parts=item) for item in parts])


def test_equal_sums_of_different_parts_get_different_credit() -> None:
    """The paper's example: (0, 2) and (0, 1) both become (-1, 1) with GRPO; here two correct parts count as two."""
    one = group({"a": 0, "b": 0}, {"a": 1, "b": 1})
    other = group({"a": 0, "b": 1}, {"a": 1, "b": 1})
    assert GDPO().credit(one) == pytest.approx([-2, 2], abs=1e-4)
    assert GDPO().credit(other) == pytest.approx([-1, 1], abs=1e-4)
    deviation = sqrt((4 + 4 + 1 + 1) / 4)
    expected = [[-2 / deviation, 2 / deviation], [-1 / deviation, 1 / deviation]]
    for got, wanted in zip(GDPO().credits([one, other]), expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-4)


def test_weights_multiply_normalized_parts() -> None:
    scaled = group({"a": 0, "b": 100}, {"a": 1, "b": 0})
    assert GDPO(weights={"b": 0.5}).credit(scaled) == pytest.approx([-0.5, 0.5], abs=1e-4)


def test_parts_are_compared_among_the_trajectories_that_have_them() -> None:
    some = group({"a": 1}, {"a": 1, "b": 0}, {"a": 1, "b": 4})
    assert GDPO().credit(some) == pytest.approx([0, -1, 1], abs=1e-4)


def test_equal_parts_give_zero_credit_and_a_single_reward_is_one_part() -> None:
    alike = group({"a": 0.1, "b": 0.7}, {"a": 0.1, "b": 0.7})
    plain = TrajectoryGroup(trajectories=[Trajectory(reward=reward) for reward in (0.0, 3.0)])
    assert GDPO().credits([alike, plain]) == [[0.0, 0.0], pytest.approx([-sqrt(2), sqrt(2)], abs=1e-4)]
    assert GDPO().credits([]) == []
    assert GDPO().baseline(plain) == 1.5


def test_reward_weights_reach_the_algorithm() -> None:
    assert algorithm_of(load_config(["algorithm.name=gdpo", "reward.weights.a=2"])).settings()["weights"] == {"a": 2.0}


def test_options_without_reward_parts_are_rejected() -> None:
    for options in ({"level": "step"}, {"kl_in": "reward", "kl_coef": 0.1}):
        with pytest.raises(ConfigError, match=f"algorithm.{next(iter(options))}"):
            GDPO(**options)  # type: ignore[arg-type]


def test_groups_of_equal_sums_get_credit_if_parts_differ() -> None:
    one, other = group({"a": 0, "b": 1}, {"a": 1, "b": 0}).trajectories
    assert one.final_reward() == other.final_reward()
    assert GDPO().compared(one) != GDPO().compared(other)
    assert GDPO().compared(one) == GDPO().compared(one)
