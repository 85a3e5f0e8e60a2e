from typing import Any

import numpy as np
import pytest

from rllm.errors import RewardError
from rllm.rewards.reward_fn import multiple_choice_reward_fn
from rllm.rewards.search_reward import chosen_letter
from rllm.types import Action

CHOICES = ["London", "Paris", "Rome", "Bonn"]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        (" **B**. ", "B"),
        ("(B)", "B"),
        ("Answer: B", "B"),
        ("answer : $B$", "B"),
        ("answer: (B) Paris, not (A) London", "B"),
        ("The correct answer is **B**.", "B"),
        ("The answer is not A. I choose (C).", "C"),
        ("Answer: A. Wait.\nAnswer: B, because it is.", "B"),
        ("The correct option is C", "C"),
        ("Answer: I think it is (D)", "D"),
        ("A is wrong and B is wrong, so it must be C.", "C"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{(b)}", "B"),
        (r"\boxed{B. Paris}", "B"),
        (r"$\boxed{B}$, as (A) is wrong", "B"),
        (r"\boxed{Paris}", None),
        ("<think>Answer: A</think>Answer: B", "B"),
        ("answer" + " " * 100_000 + "x", None),
        ("A " * 100_000 + "x", None),
        ("Paris", None),
        ("", None),
        ("I do not know", None),
        ("答案：**B**", "B"),
        ("因此，选B。", "B"),
        ("不选B", None),
        ("<answer>B</answer>", "B"),
        (r"$\boxed{\mathbf{B}}$", "B"),
        (r"\boxed{\text{(B) }Paris}", "B"),
        (r"\boxed{a = 5}", None),
        ('{"answer": "B"}', "B"),
        ("answer: b", "B"),
        ("[B]", "B"),
        ("B. Paris", "B"),
        ("**B**\n\nIt is the capital. (A) is not.", "B"),
        ("**B**\n\nIt is the capital.", "B"),
        ("Option B is correct.", "B"),
        ("Therefore, **B** is the answer.", "B"),
        ("Some say that A is the answer, but it is (B).", "B"),
        (r"The answer is \(B\).", "B"),
        ("Answer: A city of France", None),
        ("Answer: A or B", None),
        (r"\boxed{A and B}", None),
        ("A, B", None),
        ("It is not B", None),
        ("(A) is wrong. (C) is wrong.", None),
        ("The answer isn't B", None),
        ("It cannot be B.", None),
        ("Not (A).", None),
        ("Is the answer B? No, it's C.", "C"),
        ("Answer: 'B'", "B"),
        ("<answer>A) Paris, B) London</answer>", None),
        ("A: no. B: no. C: yes.", None),
    ],
)
def test_final_letter_of_an_answer_is_extracted(text: str, letter: str | None) -> None:
    assert chosen_letter(text) == letter


def test_text_of_a_choice_counts_as_its_letter() -> None:
    assert chosen_letter(r"\boxed{Paris}", CHOICES) == "B"
    assert chosen_letter("paris.", CHOICES) == "B"
    assert chosen_letter(r"\boxed{2}", ["1", "2", "3"]) == "B"
    assert chosen_letter(r"\boxed{\text{Paris}}", CHOICES) == "B"
    assert chosen_letter("<answer>Paris</answer>", CHOICES) == "B"
    assert chosen_letter("A is wrong.\nThe answer is **Paris**.", CHOICES) == "B"
    assert chosen_letter("It is in France.\n\n**B. Paris**", CHOICES) == "B"
    assert chosen_letter("Answer: A. Smith", ["B. Jones", "A. Smith"]) == "B"
    assert chosen_letter("Answer: A", ["B", "A"]) == "A"


def test_letter_next_to_the_text_of_another_choice_is_no_answer() -> None:
    assert chosen_letter("A. Paris", CHOICES) is None
    assert chosen_letter(r"\boxed{A. Paris}", CHOICES) is None
    assert chosen_letter("The answer is **A. Paris**", CHOICES) is None


def test_list_of_all_choices_is_no_answer() -> None:
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", CHOICES, strict=True))
    assert chosen_letter(listed, CHOICES) is None
    assert chosen_letter(f"{listed}\n\nI think:\nB. Paris", CHOICES) == "B"
    assert chosen_letter(f"{listed}\n\nB. Paris", CHOICES) == "B"


@pytest.mark.parametrize(
    "text",
    [
        "answer " * 10_000,
        "(A) or (B) " * 10_000,
        "A, B, " * 10_000 + "x",
        "answer: A and B (" * 10_000,
        r"\boxed{A x" + "\n" * 20_000 + "y}",
    ],
)
def test_long_texts_are_parsed_in_linear_time(text: str) -> None:
    assert chosen_letter(text, CHOICES) is None


@pytest.mark.parametrize("gold", ["B", "b", "(B)", "B. Paris", 1, np.int64(1), "Paris", "paris"])
def test_ground_truth_is_a_letter_an_index_or_a_text(gold: Any) -> None:
    task = {"ground_truth": gold, "choices": CHOICES}
    assert multiple_choice_reward_fn(task, Action("Answer: B")).reward == 1.0
    assert multiple_choice_reward_fn(task, "Answer: C").reward == 0.0
    assert multiple_choice_reward_fn({**task, "choices": np.array(CHOICES)}, "Answer: B").is_correct is True


def test_answer_without_choice_earns_0_with_the_reason() -> None:
    assert multiple_choice_reward_fn({"ground_truth": "B"}, "Hm.").metadata == {"reason": "no choice was found"}


@pytest.mark.parametrize(
    "task",
    [
        *({}, {"ground_truth": 7, "choices": CHOICES}, {"ground_truth": "Madrid", "choices": CHOICES}, {"answer": 1.5}),
        {"ground_truth": "27", "choices": list(range(30))},  # there is no such letter
    ],
)
def test_task_without_ground_truth_is_an_error(task: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="the multiple-choice reward needs"):
        multiple_choice_reward_fn(task, "Answer: B")
