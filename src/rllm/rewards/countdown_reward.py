"""The reward for Countdown: an expression that uses every given number exactly once and equals the target."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

from rllm.errors import RewardError
from rllm.rewards.reward_types import RewardConfig as RewardConfig
from rllm.rewards.reward_types import RewardInput as RewardInput
from rllm.rewards.reward_types import RewardOutput, after_thinking, field_of, last_tagged, text_of_action, texts_of
from rllm.tools.calculator import evaluate
from rllm.types import JSONMapping, Task

NAME = "the countdown reward"
MAX_CHARS = 1000

_ARITHMETIC = re.compile(r"[-+*/×·÷−–()0-9\s]+")
_WHOLE_NUMBER = re.compile(r"[0-9]+")
_VALUE = re.compile(r"\s*-?[0-9]+(?:\.[0-9]+)?\s*")


def countdown_reward_fn(task_info: Task, action: object) -> RewardOutput:
    """Return 1.0 if the last `<answer>` makes the task's `target` from all of its `nums`, else 0.0.

    The answer is an expression of + - * / and parentheses, evaluated exactly; `expression = value` is accepted if the
    value is right.

    Raises:
        RewardError: if the task lacks `target` or `nums`, or they are not numbers.
    """
    truth = {"target": field_of(task_info, "target", reward=NAME), "numbers": field_of(task_info, "nums", reward=NAME)}
    answer = _answer_in(text_of_action(action, NAME))
    fault = _fault(answer, truth)
    metadata = {"extracted": answer, **({"reason": fault} if fault else {})}
    return RewardOutput(0.0 if fault else 1.0, metadata, not fault)


def compute_score(
    solution_str: str, ground_truth: JSONMapping, *, format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return the score of a text for a `ground_truth` with `target` and `numbers`.

    It is `score` for a right answer, `format_score` for a wrong one inside its tags, and 0.0 without an answer.

    Raises:
        RewardError: if `ground_truth` lacks a field, or a field is not a number.
    """
    answer = _answer_in(solution_str)
    if not _fault(answer, ground_truth):
        return score
    return format_score if answer is not None else 0.0


def _answer_in(text: str) -> str | None:
    return last_tagged(after_thinking(text), "answer")


def _fault(answer: str | None, truth: JSONMapping) -> str | None:
    """Return why an answer is wrong; `None` if it is right."""
    target = _fraction(field_of(truth, "target", reward=NAME), "target")
    numbers = Counter(_fraction(text, "nums") for text in texts_of(field_of(truth, "numbers", reward=NAME), NAME))
    if answer is None:
        return "there is no <answer>...</answer>"
    if len(answer) > MAX_CHARS:
        return f"the answer has more than {MAX_CHARS} characters"
    expression, equals, value = answer.partition("=")
    if not _ARITHMETIC.fullmatch(expression) or "**" in expression or "//" in expression:
        return "the answer is not an expression of whole numbers, + - * / and parentheses"
    if Counter(map(Fraction, _WHOLE_NUMBER.findall(expression))) != numbers:
        return f"it does not use each of {[str(number) for number in numbers.elements()]} exactly once"
    try:
        if evaluate(expression) != target:
            return f"its value is {evaluate(expression)} and not {target}"
        if equals and not (_VALUE.fullmatch(value) and Fraction(value) == target):
            return f"it claims the value {value.strip()}, which is not {target}"
    except ValueError as error:  # `evaluate` refuses it
        return str(error)
    return None


def _fraction(value: object, field: str) -> Fraction:
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise RewardError(f"{NAME} needs numbers in the task's {field!r}, not {value!r:.200}") from None
