"""The reward for questions with short answers: exact match, else word overlap, as SQuAD and HotpotQA are scored."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rllm.rewards.reading import (
    after_thinking,
    bolds,
    field_of,
    last_boxed,
    last_line,
    last_tagged,
    text_of_action,
    texts_of,
)
from rllm.rewards.reward_types import RewardConfig, RewardInput, RewardOutput
from rllm.rewards.reward_types import RewardType as RewardType
from rllm.types import Task

__all__ = ["RewardConfig", "RewardInput", "RewardSearchFn", "exact_match", "f1_score", "normalize"]

NAME = "the search reward"
MIN_F1 = 0.3
"""Less overlap than this counts as none."""

_HYPHENS = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-"))
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_MARKS = re.escape("".join(sorted(set(string.punctuation) - set(",+#-"))) + "‘’“”„«»…。，：；！？、（）《》")
_PUNCTUATION = re.compile(
    rf",|(?<![0-9])[{_MARKS}]|[{_MARKS}](?![0-9])"  # but for those inside a number, such as 3.5
    r"|(?<![a-z+#])[+#]+"  # but for C++
    r"|(?<=[a-z])-|-(?![0-9])"  # but for -5
)
_LATEX_TEXT = re.compile(r"\\(?:text|math)(?:bf|it|rm|tt)?\{([^{}]*)\}")
_ANSWER = r"(?:\b(?:(?:the|my|final|correct)\s+){0,3}answer\b|答案)"
_LABEL = rf"{_ANSWER}[*_]*\s{{0,8}}(?:is\b|是|为)?[\s*_]{{0,8}}"
_LABELLED = re.compile(rf"^[^\w\n]*{_LABEL}[:：][\s*_]*(\S.*)$", re.IGNORECASE | re.MULTILINE)
_STATED = re.compile(rf"{_ANSWER}(?:[*_]*\s+is\b|[*_]*\s*[:：]|[是为])[\s:：]*(.+)", re.IGNORECASE)
_TITLE = re.compile(rf"{_LABEL}[:：]?|.*[:：]", re.IGNORECASE)
_CLOSED = {"yes", "no", "noanswer"}


@dataclass(frozen=True)
class RewardSearchFn:
    r"""Judges a text by its answer: in `\boxed{}`, in `<answer>`, in bold, or the last line.

    The task's `ground_truth` (or `answer`) is a text or a list of alternatives; the best counts. An exact match after
    `normalize` earns `correct_reward`; else the F1 of the words is the reward, from `MIN_F1` up.
    """

    config: RewardConfig = field(default_factory=RewardConfig)

    def __call__(self, task_info: Task | RewardInput, action: Any = None) -> RewardOutput:
        """Judge `action` for a task, or a `RewardInput`.

        Raises:
            RewardError: if the task has neither `ground_truth` nor `answer`.
        """
        given = RewardInput.of(task_info, action)
        golds = texts_of(field_of(given.task_info, "ground_truth", "answer", reward=NAME), NAME)
        answer = stated_answer(text_of_action(given.action, NAME))
        if not answer:
            return RewardOutput(self.config.format_error_reward, {"reason": "there is no answer"}, False)
        f1 = max(f1_score(answer, gold) for gold in golds)
        metadata = {"extracted": answer, "ground_truth": golds, "f1": f1}
        if exact_match(answer, golds):
            return RewardOutput(self.config.correct_reward, metadata, True)
        return RewardOutput(f1 if f1 >= MIN_F1 else self.config.incorrect_reward, metadata, False)


def stated_answer(text: str) -> str:
    """Return the part of a text that is its answer."""
    text = after_thinking(text)
    marked = last_boxed(text) or last_tagged(text, "answer")
    if marked:
        marked = _LATEX_TEXT.sub(r"\1", marked)
        stated = _STATED.match(marked)
        return stated[1].strip() if stated else marked
    line = last_line(text)
    labelled = _LABELLED.findall(text)
    stated = _STATED.search(line)
    answer = labelled[-1] if labelled else stated[1] if stated else None
    return (_emphasised(text if answer is None else answer) or answer or line).strip().strip("*_")


def _emphasised(text: str) -> str | None:
    """Return the last text in bold that is not a title such as **Answer:**."""
    return next((bold for bold in reversed(bolds(text)) if not _TITLE.fullmatch(bold)), None)


def normalize(text: str) -> str:
    """Lowercase, without punctuation and articles, words a single space apart.

    As SQuAD has it, but 3.5 is not 35, -5 not 5, and C++ not C; and punctuation that ASCII lacks counts as such,
    a dash or a minus sign as a hyphen.
    """
    return " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower().translate(_HYPHENS))).split())


def exact_match(answer: str, golds: Iterable[str]) -> bool:
    """Return whether the answer equals any gold up to case, punctuation, articles and spaces."""
    return any(_same_text(answer, gold) for gold in golds)


def _same_text(answer: str, gold: str) -> bool:
    # What is only punctuation or articles ("+", "The The") keeps them.
    return normalize(answer) == normalize(gold) if normalize(gold) else answer.strip() == gold.strip()


def f1_score(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall of the answer's words.

    It is 0.0 if yes or no is compared with anything else. After Rajpurkar et al. (2016),
    https://arxiv.org/abs/1606.05250, with HotpotQA's rule for yes and no.
    """
    answer, gold = normalize(answer), normalize(gold)
    if answer != gold and _CLOSED & {answer, gold}:
        return 0.0
    answer_words, gold_words = answer.split(), gold.split()
    num_common = (Counter(answer_words) & Counter(gold_words)).total()
    return 2 * num_common / (len(answer_words) + len(gold_words)) if num_common else 0.0
