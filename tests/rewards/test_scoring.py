import math
from typing import Any

import numpy as np
import pytest

from rllm.errors import RewardError
from rllm.rewards.reward_types import RewardOutput
from rllm.rewards.scoring import as_reward_output
from rllm.types import UNSCORED


def judged(returned: Any) -> RewardOutput:
    def exact(task: Any, action: Any) -> Any:
        return returned

    return as_reward_output(exact, {"ground_truth": "4"}, "4")


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.25), 0.25),
        (np.bool_(True), 1.0),
        (np.array(2), 2.0),
    ],
)
def test_a_number_of_any_kind_becomes_a_float(returned: Any, reward: float) -> None:
    assert judged(returned) == RewardOutput(reward)
    assert type(judged(returned).reward) is float


@pytest.mark.parametrize("returned", [None, UNSCORED, RewardOutput(None), (None, {})])
def test_a_reward_that_was_not_given_is_unscored_and_not_0(returned: Any) -> None:
    assert judged(returned).reward is None


def test_the_published_names_may_stand_in_any_order() -> None:
    def swapped(action: str, task_info: dict[str, str]) -> float:
        return float(action == task_info["ground_truth"])

    def by_name(*, task_info: dict[str, str], action: str, **kwargs: Any) -> float:
        return float(action == task_info["ground_truth"])

    for judge in (swapped, by_name, lambda task, text: text == task["ground_truth"]):
        assert as_reward_output(judge, {"ground_truth": "4"}, "4").reward == 1.0


def test_metrics_travel_as_metadata() -> None:
    assert judged((np.float64(0.5), {"turns": 3})) == RewardOutput(0.5, {"turns": 3})


def test_a_reward_output_is_kept_with_a_plain_float() -> None:
    verdict = judged(RewardOutput(np.float32(1), {"why": "exact"}, is_correct=True))
    assert verdict == RewardOutput(1.0, {"why": "exact"}, is_correct=True)
    assert type(verdict.reward) is float


@pytest.mark.parametrize(
    "returned",
    [
        math.nan,
        math.inf,
        -math.inf,
        np.float32("nan"),
        pytest.param(10**5000, id="huge"),
        RewardOutput(math.nan),
        (math.inf, {}),
    ],
)
def test_a_reward_that_is_not_finite_is_an_error_of_the_function(returned: Any) -> None:
    with pytest.raises(RewardError, match=r"reward function .*exact returned the reward .*finite number, or None"):
        judged(returned)


@pytest.mark.parametrize("returned", ["1.0", [1.0], {"reward": 1.0}, (1.0, 2.0), np.array([1.0]), 1 + 0j, object()])
def test_anything_else_is_named_with_what_may_be_returned(returned: Any) -> None:
    with pytest.raises(RewardError, match=r"exact returned .* of type \w+: return a number"):
        judged(returned)


def test_what_the_function_raises_is_named_after_it() -> None:
    class Judge:
        def __call__(self, task: Any, action: Any) -> float:
            return float(task["gold"] == action)

    with pytest.raises(RewardError, match=r"reward function .*Judge raised KeyError: 'gold'"):
        as_reward_output(Judge(), {}, "4")


def test_a_coroutine_function_is_refused_with_the_remedy() -> None:
    async def later(task: Any, action: Any) -> float:
        return 1.0

    with pytest.raises(RewardError, match="later is a coroutine function"):
        as_reward_output(later, {}, "4")
