import asyncio
import math
import threading
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rllm.errors import RewardError
from rllm.rewards.reward_types import RewardOutput
from rllm.rewards.scoring import as_reward_output, group_reward, score, score_group
from rllm.types import UNSCORED, Step, Trajectory


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
        (Decimal("0.25"), 0.25),
        (Fraction(1, 4), 0.25),
        (torch.tensor(0.25), 0.25),
        (torch.tensor(True), 1.0),
    ],
)
def test_any_number_becomes_a_float(returned: Any, reward: float) -> None:
    assert judged(returned) == RewardOutput(reward)
    assert type(judged(returned).reward) is float


@pytest.mark.parametrize("returned", [None, UNSCORED, RewardOutput(None), (None, {})])
def test_missing_reward_is_unscored_instead_of_0(returned: Any) -> None:
    assert judged(returned).reward is None


def test_parameters_with_published_names_may_be_in_any_order() -> None:
    def swapped(action: str, task_info: dict[str, str]) -> float:
        return float(action == task_info["ground_truth"])

    def by_name(*, task_info: dict[str, str], action: str, **kwargs: Any) -> float:
        return float(action == task_info["ground_truth"])

    for judge in (swapped, by_name, lambda task, text: text == task["ground_truth"]):
        assert as_reward_output(judge, {"ground_truth": "4"}, "4").reward == 1.0


def test_metrics_are_returned_as_metadata() -> None:
    assert judged((np.float64(0.5), {"turns": 3})) == RewardOutput(0.5, {"turns": 3})


def test_reward_output_is_kept_with_a_plain_float() -> None:
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
        Decimal("sNaN"),
        {"right": 1.0, "short": math.nan},
    ],
)
def test_non_finite_reward_is_an_error_of_the_function(returned: Any) -> None:
    with pytest.raises(RewardError, match=r"reward function .*exact.* returned the reward .*finite number, or None"):
        judged(returned)


@pytest.mark.parametrize(
    "returned", ["1.0", [1.0], {}, {"a": [1.0]}, (1.0, 2.0), torch.ones(1), np.array([1.0]), 1 + 0j, object()]
)
def test_other_return_values_are_rejected_with_the_accepted_ones(returned: Any) -> None:
    with pytest.raises(RewardError, match=r"exact.* returned .* of type \w+: return a number"):
        judged(returned)


def test_exception_of_the_function_names_it() -> None:
    class Judge:
        def __call__(self, task: Any, action: Any) -> float:
            return float(task["gold"] == action)

    with pytest.raises(RewardError, match=r"reward function .*Judge raised KeyError: 'gold'"):
        as_reward_output(Judge(), {}, "4")


def test_error_names_the_task_if_it_has_an_id() -> None:
    with pytest.raises(RewardError, match=r"nothing for task 'figs:7' returned the reward nan"):
        as_reward_output(nothing, {"id": "figs:7"}, "4")


def nothing(task: Any, action: Any) -> float:
    return math.nan


def test_named_parts_are_summed_by_the_weights_of_the_function() -> None:
    def both(task: Any, action: Any) -> dict[str, float]:
        return {"right": True, "short": np.float32(0.5)}

    found = as_reward_output(both, {}, "4")
    assert (found.reward, found.parts, found.is_correct) == (1.5, {"right": 1.0, "short": 0.5}, True)
    both.weights = {"right": 2.0, "short": 0.5}  # type: ignore[attr-defined]
    assert as_reward_output(both, {}, "4").reward == 2.25


def test_first_part_decides_correctness() -> None:
    assert judged({"right": 0.0, "polite": 3.0}).is_correct is False


def test_missing_part_leaves_the_whole_unscored() -> None:
    assert judged({"right": 1.0, "style": None}) == RewardOutput(
        None, {"error": "its part 'style' is None"}, parts={"right": 1.0}
    )


async def test_async_function_is_awaited_with_or_without_an_event_loop() -> None:
    async def later(task: Any, action: Any) -> float:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return 0.5

    loops: list[Any] = []
    assert (await score(later, {}, "4")).reward == 0.5
    assert loops == [asyncio.get_running_loop()]
    assert (await asyncio.to_thread(as_reward_output, later, {}, "4")).reward == 0.5


@pytest.mark.parametrize("is_async", [True, False])
async def test_timeout_error_names_the_function_and_its_deadline(is_async: bool) -> None:
    end = threading.Event()

    async def hangs_async(task: Any, action: Any) -> None:
        await asyncio.Event().wait()

    def hangs(task: Any, action: Any) -> None:
        end.wait(60)

    with pytest.raises(RewardError, match=r"hangs.* did not finish within 0.01 s: raise reward.timeout_s"):
        await score(hangs_async if is_async else hangs, {}, "4", timeout_s=0.01)
    end.set()


async def test_timeout_raised_by_the_function_is_its_own_error() -> None:
    def slow(task: Any, action: Any) -> float:
        raise TimeoutError("the database")

    with pytest.raises(RewardError, match="slow raised TimeoutError: the database"):
        await score(slow, {}, "4", timeout_s=60)


ANSWERS = [Trajectory(output="fig"), Trajectory(output="lime"), Trajectory(steps=[Step(model_response="kiwi")])]


@pytest.mark.parametrize("as_array", [list, np.array, torch.tensor])
async def test_group_function_gets_all_answers_and_returns_a_list(as_array: Any) -> None:
    @group_reward
    def lengths(task: Any, answers: list[str], trajectories: list[Trajectory]) -> Any:
        assert [path.output for path in trajectories] == ["fig", "lime", None]
        return as_array([len(answer) for answer in answers])

    assert [item.reward for item in await score_group(lengths, {}, ANSWERS)] == [3.0, 4.0, 4.0]


@pytest.mark.parametrize("returned", [[1.0, 0.0], 1.0, None, {"fig": 1.0}, np.ones((3, 1)), ["1", "2", "3"]])
async def test_group_function_must_return_one_reward_per_answer(returned: Any) -> None:
    @group_reward
    async def ranks(task: Any, answers: list[str]) -> Any:
        return returned

    with pytest.raises(RewardError, match=r"ranks returned .*(for each of 3 answers|return a number)"):
        await score_group(ranks, {}, ANSWERS)
