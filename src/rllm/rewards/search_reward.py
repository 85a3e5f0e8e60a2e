"""Rewards for short answers.

Questions are scored by exact match, else by the overlap of words, as SQuAD and HotpotQA are; multiple choice by the
letter that a text settles on.
"""

from __future__ import annotations

import re
import string
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

from rllm.data.rows import plain_value
from rllm.errors import RewardError
from rllm.rewards.reward_types import (
    RewardConfig,
    RewardInput,
    RewardOutput,
    after_thinking,
    field_of,
    last_boxed,
    last_tagged,
    text_of_action,
    texts_of,
)
from rllm.rewards.reward_types import RewardType as RewardType
from rllm.types import Task

__all__ = [
    "RewardChoiceFn",
    "RewardConfig",
    "RewardInput",
    "RewardSearchFn",
]

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
_LATEX_TEXT = re.compile(r"\\(?:text|math)(?:bf|it|rm|tt)?\s*\{([^{}]*)\}")
_ANSWER = r"(?:\b(?:(?:the|my|final|correct)\s+){0,3}answer\b|答案)"
_LABEL = rf"{_ANSWER}[*_]*\s{{0,8}}(?:is\b|是|为)?[\s*_]{{0,8}}"
_LABELLED = re.compile(rf"^[^\w\n]*{_LABEL}[:：][\s*_]*(\S.*)$", re.IGNORECASE | re.MULTILINE)
_STATED = re.compile(rf"{_ANSWER}(?:[*_]*\s+is\b|[*_]*\s*[:：]|[是为])[\s:：]*(.+)", re.IGNORECASE)
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_TITLE = re.compile(rf"{_LABEL}[:：]?|.*[:：]", re.IGNORECASE)
_CLOSED = {"yes", "no", "noanswer"}


@dataclass(frozen=True)
class RewardSearchFn:
    r"""Judges a text by its answer: in `\boxed{}`, in `<answer>`, in bold, or the last line.

    The task's `ground_truth` (or `answer`) is a text or a list of alternatives; the best counts. An exact match after
    `normalize` earns `correct_reward`; else the F1 of the words is the reward, from `MIN_F1` up.
    """

    config: RewardConfig = field(default_factory=RewardConfig)

    def __call__(self, task_info: Task | RewardInput, action: object = None) -> RewardOutput:
        """Judge `action` for a task, or a `RewardInput`.

        Raises:
            RewardError: if the task has neither `ground_truth` nor `answer`.
        """
        given = RewardInput.of(task_info, action)
        golds = texts_of(field_of(given.task_info, "ground_truth", "answer", reward=NAME), NAME)
        answer = stated_answer(text_of_action(given.action, NAME))
        if not answer:
            return RewardOutput(self.config.format_error_reward, {"reason": "there is no answer", "f1": 0.0}, False)
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
    line = text.strip().rpartition("\n")[2].strip()
    labelled = _LABELLED.findall(text)
    stated = _STATED.search(line)
    answer = labelled[-1] if labelled else stated[1] if stated else None
    bolds = [bold.strip() for bold in _BOLD.findall(text if answer is None else answer)]
    emphasized = next((bold for bold in reversed(bolds) if not _TITLE.fullmatch(bold)), None)  # no **Answer:**
    return (emphasized or answer or line).strip().strip("*_")


def normalize(text: str) -> str:
    """Return text in lower case, without punctuation and articles, and with single spaces between words.

    As in SQuAD, but 3.5 is not 35, -5 not 5, and C++ not C; punctuation outside of ASCII is removed, too, and a dash or
    a minus sign counts as a hyphen.
    """
    return " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower().translate(_HYPHENS))).split())


def exact_match(answer: str, golds: Iterable[str]) -> bool:
    """Return whether the answer equals any gold up to case, punctuation, articles and spaces."""
    return any(
        # A gold of punctuation or articles only ("+", "The The") keeps them.
        normalize(answer) == normalize(gold) if normalize(gold) else answer.strip() == gold.strip()
        for gold in golds
    )


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


# Multiple choice

CHOICE_NAME = "the multiple-choice reward"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_ANNOUNCED = 50
"""Number of "the answer is" statements that are read, from the end."""
MAX_LINE = 1000
"""Number of characters read after each statement."""

_AMBIGUOUS = ""
"""Result for several letters, or a letter with the text of another choice: no decision."""

_LETTER = (
    r"(?:[B-HJ]|A(?!\s+(?!(?:is|as|because|since|and|or)\b)[a-z])|I(?!\s+[a-z]))(?![A-Za-z0-9+#]|['’][A-Za-z])"
    r"(?![)\]*_\"'”’]{0,4}\?)"
)
"""Not the article, as in "Answer: A city", the pronoun, as in "Answer: I think ...", or a letter in a question."""
_BETWEEN = r"[\s)\]*_$]{0,8}(?:[,/&、和或]|and\b|or\b)[\s(\[*_$]{0,8}(?:(?:and|or)\b[\s(]{0,8})?"
_LISTED = rf"{_LETTER}(?:{_BETWEEN}{_LETTER}){{0,9}}"
_WRAPPING = r"(?:[\s:：=*_`$({\[<\"'“‘]|\\[(\[])*(?:\\(?:text|math)(?:bf|rm)?\{[\s(]*)?"
_NOT = r"(?<!\b[Nn]ot\s)(?<!\b[Nn]or\s)(?<!n['’]t\s)(?<!not\sbe\s)(?<!n['’]t\sbe\s)"
_NOT_WRONG = r"(?!\W{0,8}(?:is\s+)?(?:not|wrong|incorrect|false)\b)"
_ANNOUNCED = re.compile(
    r"(?:(?i:\banswer\b(?:\s+(?:is|should\s+be|must\s+be)\b)?|\b(?:choice|option)\s+is\b|\b(?:choose|select|pick)\b)"
    r"(?i:\s+(?:option|choice)\b)?|答案(?:应该?)?[是为选]?择?|选项[是为]|(?<!不)(?<!不能)选择?)"
    rf"{_WRAPPING}"
)
_PATTERNS = (
    re.compile(rf"\b({_LISTED})[)*_]*\s+is\s+(?:the\s+)?(?:correct|right|best)\b"),
    re.compile(rf"{_NOT}\(({_LISTED})\){_NOT_WRONG}"),
    re.compile(rf"(?:^|[\s*_]){_NOT}({_LISTED})[\s.)*_。]*$"),
    re.compile(rf"\b({_LISTED})[)*_]*\s+is\s+the\s+answer\b(?!\s*\?)"),
    re.compile(rf"\A[\s*_(]*({_LISTED})[)*_. \t]*\n"),
)
"""Patterns from the most to the least explicit.

They match `B is correct`, `(B)`, a letter by itself at the end, `B is the answer`, and a letter in the first line.
"""
_CHOICE_NAMED = re.compile(rf"({_LISTED})|([a-j])[\s.)*_`$}}\]\"'”]*$")
_CHOICE = re.compile(
    rf"([A-Za-z])(?:(?P<mark>[\s*_`$)}}\]\"'”]*(?:[.:,、)}}\]]+|$){_NOT_WRONG})|\s)[\s*_`$\"']*",
)
_ANOTHER_LABEL = re.compile(r"(?:\n[^\S\n]*|[,;.]\s+)[*_]*\(?[A-J][*_]*[):]|\n[^\S\n]*[*_]*\(?[A-J][*_]*\.")


@dataclass(frozen=True)
class RewardChoiceFn:
    r"""Reward for the choice of a text: in a box, in `<answer>`, as `Answer: B`, as `(B)`, or as a letter at the end.

    The task's `ground_truth` (or `answer`) is a letter, an index counted from 0, or with `choices` the text of one of
    them, which then also counts as its letter in a box or an answer.
    """

    config: RewardConfig = field(default_factory=RewardConfig)

    def __call__(self, task_info: Task | RewardInput, action: object = None) -> RewardOutput:
        """Judge `action` for a task.

        Raises:
            RewardError: if the task has no usable ground truth.
        """
        given = RewardInput.of(task_info, action)
        truth = field_of(given.task_info, "ground_truth", "answer", reward=CHOICE_NAME)
        choices = list(map(str, plain_value(given.task_info.get("choices")) or ()))
        gold = _gold_letter(truth, choices)
        letter = chosen_letter(text_of_action(given.action, CHOICE_NAME), choices)
        if letter is None:
            return RewardOutput(self.config.format_error_reward, {"reason": "no choice was found"}, False)
        metadata = {"extracted": letter, "ground_truth": gold}
        reward = self.config.correct_reward if letter == gold else self.config.incorrect_reward
        return RewardOutput(reward, metadata, letter == gold)


def chosen_letter(text: str, choices: Sequence[str] = ()) -> str | None:
    """Return the letter that a text chooses by letter or by content; `None` if it chooses none or several."""
    text = after_thinking(text).strip()
    for read in (_marked, _announced, _by_itself, _whole):
        letter = read(text, choices)
        if letter is not None:
            return letter or None
    return None


def _marked(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice inside a box or a tag."""
    for marked in (last_boxed(text), last_tagged(text, "answer")):
        letter = None if marked is None else _choice_in(marked, choices)
        if letter is not None:
            return letter
    return None


def _announced(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice after the last "answer:" or an equivalent phrase."""
    for announced in reversed(deque(_ANNOUNCED.finditer(text), MAX_ANNOUNCED)):
        line = text[announced.end() : announced.end() + MAX_LINE].partition("\n")[0]
        letter = _letter_of_text(line, choices)
        if letter is not None:
            return letter
        named = _CHOICE_NAMED.match(line)
        if named is not None:
            return _AMBIGUOUS if _choice_in(line, choices) == _AMBIGUOUS else _only_letter(named[1] or named[2].upper())
    return None


def _by_itself(text: str, choices: Sequence[str]) -> str | None:
    """Return a letter at a place where choices are stated."""
    for pattern in _PATTERNS:
        found = pattern.findall(text)
        if found:
            return _only_letter(found[-1])
    return None


def _whole(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice of a text that consists of it, or whose last line has a letter and its content."""
    if "\n" not in text:
        return _choice_in(text, choices)
    before, line = [line for line in text.split("\n") if line.strip()][-2:]
    letter, letter_before = _choice_with_text(line, choices), _choice_with_text(before, choices)
    is_listed = letter is not None and letter_before is not None and letter_before < letter
    return None if is_listed else letter


def _choice_with_text(line: str, choices: Sequence[str]) -> str | None:
    """Return the letter of a line that has both a letter and the content of that choice."""
    letter = _choice_in(line, choices)
    chosen = choices[LETTERS.index(letter) :][:1] if letter else []
    return letter if any(normalize(line).endswith(normalize(choice)) for choice in chosen) else None


def _choice_in(marked: str, choices: Sequence[str]) -> str | None:
    """Return the letter of a text such as `B`, `(b)` or `B. Paris`, or of the content of a choice."""
    plain = _LATEX_TEXT.sub(r"\1", marked).strip().lstrip("([{*_`$\"'“")
    letter = _letter_of_text(plain, choices)
    if letter is not None:
        return letter
    listed = re.match(_LISTED, plain)
    if listed is not None and _only_letter(listed[0]) == _AMBIGUOUS:
        return _AMBIGUOUS
    found = _CHOICE.match(plain)
    if found is None:
        return None
    letter, named = found[1].upper(), _letter_of_text(plain[found.end() :], choices)
    if named is not None:
        return letter if named == letter else _AMBIGUOUS
    if _ANOTHER_LABEL.search(plain, found.end()):
        return _AMBIGUOUS
    return letter if found["mark"] is not None else None


def _only_letter(listed: str) -> str:
    """Return the letter of "B", or of "B and B"."""
    letters = set(re.findall(r"\b[A-J]\b", listed))
    return letters.pop() if len(letters) == 1 else _AMBIGUOUS


def _gold_letter(truth: object, choices: Sequence[str]) -> str:
    if isinstance(truth, str):
        letter = _choice_in(truth, choices)
        if letter:
            return letter
    elif isinstance(truth, SupportsIndex) and 0 <= int(truth) < (len(choices) or len(LETTERS)):
        return LETTERS[int(truth)]
    raise RewardError(
        f"{CHOICE_NAME} needs a ground truth that is a letter, an index from 0, or one of the task's 'choices', "
        f"not {truth!r:.200}"
    )


def _letter_of_text(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the choice with this content, if it has a letter."""
    known, text = choices[: len(LETTERS)], text.strip()
    if text in known and text not in LETTERS:  # a bare letter is a label
        return LETTERS[known.index(text)]
    labelled = _CHOICE.match(text)
    if labelled is not None and labelled["mark"] is not None:  # "A." is not an article
        return None
    texts = [normalize(choice) or choice.strip() for choice in known]
    text = normalize(text) or text
    return LETTERS[texts.index(text)] if text in texts else None
