from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import RewardError
from rllm.rewards.reward_fn import f1_reward_fn, search_reward_fn
from rllm.rewards.search_reward import RewardConfig, RewardInput, RewardSearchFn, f1_score, normalize
from rllm.types import Action


def test_example_of_the_tutorial_has_its_reward() -> None:
    judge = RewardSearchFn(RewardConfig())
    verdict = judge(RewardInput(task_info={"ground_truth": "Paris"}, action="Paris"))
    assert (verdict.reward, verdict.is_correct) == (1.0, True)


def test_articles_punctuation_and_case_are_normalized() -> None:
    assert normalize("  The  Beatles' \n song, an Ode.") == "beatles song ode"


@pytest.mark.parametrize(
    "text",
    [
        "Paris",
        "the paris!",
        r"I think \boxed{\text{Paris}}, yes.",
        "So: <answer> Paris </answer>.",
        "It is **Paris**, I am sure.",
        "I searched.\nFinal answer: Paris.",
        "After much thought the answer is Paris.",
        "<think>**London**</think>\nParis",
        "**Answer:** Paris",
        "**Answer: Paris**",
        "**Answer:** Paris\n\nIt is the capital.",
        "**Final Answer**\n\nParis",
        "Not **London**.\nThe answer is Paris.",
        "**Note:** it is **Paris**. **Source:** a map",
        "The answer is **Paris**, the capital.",
        r"\boxed{\mathbf{Paris}}",
        "<answer>The answer is Paris</answer>",
        "答案：“Paris”。",
    ],
)
def test_answers_are_extracted_from_text(text: str) -> None:
    assert search_reward_fn({"ground_truth": "Paris"}, Action(text)).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "gold", "f1"),
    [
        ("Paris", "Paris", 1.0),
        ("Paris France", "Paris", 2 / 3),  # precision 1/2, recall 1
        ("in Paris in France", "Paris", 2 / 5),  # precision 1/4, recall 1
        ("new york new york", "new york", 2 / 3),  # a word counts as often as the gold has it
        ("London", "Paris", 0.0),
        ("yes it is", "yes", 0.0),
        ("the", "a", 0.0),
        ("", "Paris", 0.0),
    ],
)
def test_f1_matches_hand_computed_values(answer: str, gold: str, f1: float) -> None:
    assert f1_score(answer, gold) == pytest.approx(f1)


def test_partial_overlap_earns_its_f1_from_0_3() -> None:
    task = {"ground_truth": "Paris"}
    assert search_reward_fn(task, "in Paris in France").reward == pytest.approx(0.4)
    assert search_reward_fn(task, "in Paris in France in Europe or so").reward == 0.0  # F1 = 2/9
    assert search_reward_fn(task, "in Paris in France").is_correct is False


@pytest.mark.parametrize(
    ("gold", "answer"), [("3.5", "35"), ("-5", "5"), ("1998-99", "199899"), ("2:1", "21"), ("C++", "C"), ("3.5", "3.6")]
)
def test_numbers_and_names_may_differ_in_punctuation(gold: str, answer: str) -> None:
    assert search_reward_fn({"ground_truth": gold}, answer).reward == 0.0
    assert search_reward_fn({"ground_truth": gold}, f"{gold}.").reward == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1990–1995", "1990-1995"),
        ("1990-1995", "1990—1995"),
        ("-5", "−5"),
        ("covid‑19", "COVID-19"),
        ("Paris–Nice", "Paris-Nice"),
    ],
)
def test_every_dash_equals_a_hyphen(gold: str, answer: str) -> None:
    assert search_reward_fn({"ground_truth": gold}, answer).reward == 1.0
    assert normalize("1990–1995") != normalize("19901995")


def test_thousands_separators_currencies_and_percent_are_ignored() -> None:
    for gold, answer in [("1,000", "1000"), ("$5", "5"), ("5%", "5"), ("100+", "100"), ("covid-19", "COVID19")]:
        assert search_reward_fn({"ground_truth": gold}, answer).reward == 1.0


@pytest.mark.parametrize(
    "text",
    ["answer " * 50_000, "the " * 50_000 + "answer", "**" * 50_000, "\n *" * 50_000, "answer" + " " * 100_000 + "x"],
)
def test_long_texts_are_parsed_in_linear_time(text: str) -> None:
    assert search_reward_fn({"ground_truth": "Paris"}, text).reward == 0.0


def test_best_of_several_ground_truths_counts() -> None:
    assert search_reward_fn({"ground_truth": ["New York City", "NYC"]}, "NYC").reward == 1.0
    assert search_reward_fn({"answer": ["New York City", "NYC"]}, "New York").reward == pytest.approx(4 / 5)


def test_articles_and_punctuation_alone_are_compared_unchanged() -> None:
    assert search_reward_fn({"ground_truth": "The The"}, "The The").reward == 1.0
    assert search_reward_fn({"ground_truth": "The The"}, "!!!").reward == 0.0
    assert search_reward_fn({"ground_truth": "A"}, "An").reward == 0.0


@pytest.mark.parametrize("text", ["", "   \n ", "<think>Paris</think>", None])
def test_empty_answer_earns_0(text: Any) -> None:
    assert search_reward_fn({"ground_truth": "Paris"}, text).reward == 0.0


def test_task_without_ground_truth_is_an_error_instead_of_0() -> None:
    with pytest.raises(RewardError, match="the search reward needs the task's field 'ground_truth' or 'answer'"):
        search_reward_fn({"question": "?"}, "Paris")


def test_pure_f1_has_no_threshold_and_uses_the_whole_text() -> None:
    verdict = f1_reward_fn({"ground_truth": "Paris"}, "one two three\nfour five six **seven** Paris eight")
    assert verdict.reward == pytest.approx(2 / 10)
    assert f1_reward_fn({"ground_truth": ["London", "Paris"]}, "Paris").is_correct is True


WORDS = st.text(alphabet="ab the-.,35+é", max_size=12)


@given(WORDS, WORDS)
def test_f1_is_symmetric_and_a_fraction(left: str, right: str) -> None:
    assert f1_score(left, right) == f1_score(right, left)
    assert 0.0 <= f1_score(left, right) <= 1.0
