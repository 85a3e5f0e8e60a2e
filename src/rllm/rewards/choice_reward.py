"""The reward for multiple choice: the letter that a text settles on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.errors import RewardError
from rllm.rewards.reading import after_thinking, field_of, last_boxed, text_of_action
from rllm.rewards.reward_types import RewardConfig, RewardInput, RewardOutput
from rllm.rewards.search_reward import normalize
from rllm.types import Task

NAME = "the multiple-choice reward"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_WRAPPING = r"[\s:=*_`$({\[]*(?:\\text(?:bf)?\{)?"
_LETTER = r"([A-HJ]|I(?!'|\s+[a-z]))\b"
"""But for the pronoun, as in "Answer: I think ..."."""
_PATTERNS = (
    re.compile(rf"(?i:\banswer\b(?:\s+is\b)?|\b(?:choice|option)\s+is\b){_WRAPPING}{_LETTER}"),
    re.compile(rf"\({_LETTER}\)"),
    re.compile(rf"(?:^|[\s*_]){_LETTER}[\s.)*_]*$"),
)
"""In order of how plainly they state a choice: `Answer: B`, `(B)`, a letter on its own at the end."""
_LABELLED = re.compile(rf"{_WRAPPING}([A-Za-z])(?:[\s.):}}\]*]|$)")


@dataclass(frozen=True)
class RewardChoiceFn:
    r"""Judges a text by the choice it makes: in `\boxed{}`, as `Answer: B`, as `(B)`, or as a letter at the end.

    The task's `ground_truth` (or `answer`) is a letter, an index counted from 0, or with `choices` the text of one of them.
    """

    config: RewardConfig = field(default_factory=RewardConfig)

    def __call__(self, task_info: Task | RewardInput, action: Any = None) -> RewardOutput:
        """Judge `action` for a task.

        Raises:
            RewardError: if the task has no usable ground truth.
        """
        given = RewardInput.of(task_info, action)
        truth = field_of(given.task_info, "ground_truth", "answer", reward=NAME)
        choices = _choices(given.task_info.get("choices"))
        gold = _gold_letter(truth, choices)
        letter = chosen_letter(text_of_action(given.action, NAME), choices)
        if letter is None:
            return RewardOutput(self.config.format_error_reward, {"reason": "no choice was found"}, False)
        metadata = {"extracted": letter, "ground_truth": gold}
        reward = self.config.correct_reward if letter == gold else self.config.incorrect_reward
        return RewardOutput(reward, metadata, letter == gold)


def chosen_letter(text: str, choices: Sequence[str] = ()) -> str | None:
    """The letter that a text chooses, or whose text it gives in a box."""
    text = after_thinking(text).strip()
    boxed = last_boxed(text)
    if boxed is not None:
        letter = _letter_of_text(boxed, choices) or _label(boxed)
        if letter:
            return letter
    for pattern in _PATTERNS:
        found = pattern.findall(text)
        if found:
            return str(found[-1])
    return _letter_of_text(text, choices)


def _choices(choices: Any) -> list[str]:
    choices = choices.tolist() if hasattr(choices, "tolist") else choices
    return [str(choice) for choice in choices or ()]


def _gold_letter(truth: Any, choices: Sequence[str]) -> str:
    if isinstance(truth, str):
        letter = _letter_of_text(truth, choices) or _label(truth)
        if letter:
            return letter
    elif hasattr(truth, "__index__") and 0 <= int(truth) < (len(choices) or len(LETTERS)):
        return LETTERS[int(truth)]
    raise RewardError(
        f"{NAME} needs a ground truth that is a letter, an index from 0, or one of the task's 'choices', not {truth!r:.200}"
    )


def _label(text: str) -> str | None:
    """The letter that a text such as `B`, `(b)` or `B. Paris` begins with."""
    found = _LABELLED.match(text)
    return found[1].upper() if found else None


def _letter_of_text(text: str, choices: Sequence[str]) -> str | None:
    """The letter of the choice that this is the text of, among those for which there are letters."""
    texts = [normalize(choice) or choice.strip() for choice in choices[: len(LETTERS)]]
    text = normalize(text) or text.strip()
    return LETTERS[texts.index(text)] if text in texts else None
