from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import RewardError
from rllm.rewards.countdown_reward import compute_score, countdown_reward_fn
from rllm.types import Action

TASK = {"target": 150, "nums": [3, 50]}


def reward_of(answer: str, task: dict[str, Any] = TASK) -> float | None:
    return countdown_reward_fn(task, f"<think>...</think> I say <answer>{answer}</answer>").reward


@pytest.mark.parametrize(
    ("nums", "target", "answer"),
    [
        ([3, 50], 150, "3 * 50"),
        ([3, 50], 150, "3 * 50 = 150"),
        ([3, 50], 150, "50*3=150.0"),
        ([3, 50], 150, "\n(3) × 50\n"),
        ([19, 36, 55, 7], 65, "55 + 36 - 7 - 19"),
        ([3, 3, 8, 8], 24, "8 / (3 - 8/3)"),
        ([1, 3], 3, "3 ÷ 1"),
        ([2, 2], 4, "2 + 2"),
        ([2, 5], -3, "2 - 5"),
        ([2, 5], -3, "2 - 5 = -3"),
        (np.array([2, 5]), np.int64(7), "2 + 5"),
        ([np.int64(2), 5.0], "7", "2 + 5"),
    ],
)
def test_using_every_number_once_for_the_target_earns_1(nums: Any, target: Any, answer: str) -> None:
    assert reward_of(answer, {"target": target, "nums": nums}) == 1.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("3 + 50", "its value is 53 and not 150"),
        ("150", "exactly once"),
        ("3 * 50 * 1", "exactly once"),
        ("3 * 50 + 3 - 3", "exactly once"),
        ("350", "exactly once"),
        ("3 * 50 = 151", "claims the value 151"),
        ("3 * 50 = 150 = 150", "claims the value"),
        ("3 * 50 = 1e999999999", "claims the value"),
        ("3 + 50 = 150", "its value is 53"),
        ("3 ** 50", "not an expression"),
        ("3 // 50", "not an expression"),
        ("3 * fifty", "not an expression"),
        ("__import__('os').getpid() * 3 * 50", "not an expression"),
        ("3 * (50", "not an arithmetic expression"),
        ("3(50)", "not arithmetic"),
        ("3 / (50 - 50)", "exactly once"),
        ("", "not an expression"),
    ],
)
def test_wrong_answer_earns_0_with_the_reason(answer: str, reason: str) -> None:
    verdict = countdown_reward_fn(TASK, f"<answer>{answer}</answer>")
    assert (verdict.reward, verdict.is_correct) == (0.0, False)
    assert reason in verdict.metadata["reason"]


def test_last_answer_counts() -> None:
    assert countdown_reward_fn(TASK, "<answer>3+50</answer> no: <answer>3*50</answer>").reward == 1.0
    assert countdown_reward_fn(TASK, Action("<answer>3*50</answer>")).is_correct is True


@pytest.mark.parametrize("text", ["", "3 * 50", "<answer>3 * 50", "<think><answer>3 * 50</answer></think>"])
def test_missing_answer_earns_0(text: str) -> None:
    assert countdown_reward_fn(TASK, text).metadata["reason"] == "there is no <answer>...</answer>"


@pytest.mark.parametrize(
    "answer", ["9**9**9**9", "(" * 5_000 + "9", "9*" * 5_000 + "9", "-" * 100_000 + "9", "9" * 100_000]
)
def test_pathological_answers_do_not_hang(answer: str) -> None:
    assert reward_of(answer, {"target": 9, "nums": [9, 9, 9, 9]}) == 0.0


def test_quotients_are_exact() -> None:
    assert reward_of("1 / 3 * 3", {"target": 1, "nums": [1, 3, 3]}) == 1.0
    assert reward_of("1000000000 / 3", {"target": 333333333, "nums": [1000000000, 3]}) == 0.0


@given(st.lists(st.integers(1, 99), min_size=2, max_size=5), st.data())
def test_any_expression_earns_1_for_its_own_value(nums: list[int], data: st.DataObject) -> None:
    expression = str(nums[0])
    for number in nums[1:]:
        expression = f"({expression} {data.draw(st.sampled_from('+-*'))} {number})"
    assert reward_of(expression, {"target": eval(expression), "nums": nums[::-1]}) == 1.0


def test_wrong_answer_in_its_tags_can_earn_a_format_reward() -> None:
    truth = {"target": 150, "numbers": [3, 50]}
    texts = ["<answer>3 * 50</answer>", "<answer>3 + 50</answer>", "3 * 50"]
    assert [compute_score(text, truth, format_score=0.1, score=2.0) for text in texts] == [2.0, 0.1, 0.0]


@pytest.mark.parametrize(
    ("task", "field"),
    [
        ({"nums": [1]}, "target"),
        ({"target": 1}, "nums"),
        ({"target": "x", "nums": [1]}, "target"),
        ({"target": 1, "nums": "x"}, "nums"),
        ({"target": 1, "nums": ["1/0"]}, "nums"),
    ],
)
def test_incomplete_task_is_an_error_instead_of_0(task: dict[str, Any], field: str) -> None:
    with pytest.raises(RewardError, match=f"the countdown reward needs .*'{field}'"):
        countdown_reward_fn(task, "<answer>1</answer>")
