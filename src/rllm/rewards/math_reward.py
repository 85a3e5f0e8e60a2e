r"""The reward for mathematics: the answer in the last `\boxed{}`, equal to the ground truth as mathematics.

Texts and numbers are compared here, and everything else by math-verify in warm worker processes
(`equivalence_worker`): a comparison may have to be killed, and math-verify's own deadlines do not work in the threads
in which rewards run.
"""

from __future__ import annotations

import atexit
import os
import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import LifoQueue
from unicodedata import normalize

from rllm.errors import MissingDependencyError, RewardError
from rllm.rewards.reward_types import (
    RewardConfig,
    RewardInput,
    RewardOutput,
    after_thinking,
    field_of,
    last_boxed,
    text_of_action,
    texts_of,
)
from rllm.rewards.reward_types import RewardType as RewardType
from rllm.sandbox.python import Worker
from rllm.types import Task

NAME = "the math reward"
NUM_WORKERS = min(4, os.cpu_count() or 1)
MAX_CHARS = 1000
"""Longer answers are never compared: parsing takes more than linear time."""

_PROGRAM = Path(__file__).with_name("equivalence_worker.py")

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_FRACTION = re.compile(r"(-?)(?:\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|\\frac([0-9])([0-9])|([0-9]+)/([0-9]+))")
_FLOAT = re.compile(rf"(?<![0-9A-Za-z.])({_NUMBER.pattern})[eE]([-+]?[0-9]{{1,3}})(?![0-9A-Za-z.])")
_POWER = r"\1 \\cdot 10^{\2}"
_ASSIGNED = re.compile(r"\s*([A-Za-z])\s*=([^=]+)")
_ASSIGNED_TUPLE = re.compile(r"\(([A-Za-z](?:,[A-Za-z])+)\)=\(([^()]+)\)")
_AND = re.compile(r"(?:,\s*)?(?:\\text\{\s*and\s*\}|\band\b)")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_IGNORED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\\$|\$|\\?%|\^\\circ|\^\{\\circ\}|°|"
    r"\\q?quad(?![a-z])|~|\s|\\text\{\s*\}"
)
_SPACE = r"(?:\\[,;:! ]|~|\s)"
_GROUPED = re.compile(rf"(?<![0-9.,_^])[0-9]{{1,3}}(?:{_SPACE}+[0-9]{{3}})+(?![0-9])")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_RAISED, _PART = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+"), re.compile("[¼-¾⅐-⅞]")
_REPEATING = re.compile(r"(?<![0-9A-Za-z.])([0-9]+)\.([0-9]*)\\(?:overline|bar)\{([0-9]+)\}")
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?[0-9]\}?)?\s*(?:\\left)?[({]?\s*)"
    r"([0-9]+(?:\.[0-9]+)?)\s*(?:\^\{?\s*\\circ\s*\}?|°)"
)
_SPELLINGS = {
    "·": r"\cdot ",
    "∞": r"\infty ",
    r"\colon": ":",
    "~": " ",
    "£": r"\$",
    "€": r"\$",
    "¥": r"\$",
    r"\pounds": r"\$",
}
"""One currency is as good as another, since all are left out."""
_THOUSANDS = re.compile(r"(?<=[0-9])(?:(?:\{,\}|,(?:\\!)+)\s*(?=[0-9]{3}(?![0-9]))|,\s*(?=000(?![0-9])))")
"""A comma inside a number for certain."""
_EITHER = re.compile(r"(?<![0-9.,_^])(?!(?<=[({\[])[0-9,]+[)\]\\])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
"""One number, or several of three digits; alone in brackets, they are several."""
_BARE = re.compile(r"(\\[dt]?frac|\\[dt]?binom)\s*([0-9])\s*([0-9])(?![0-9])")
_MIXED = re.compile(rf"(?<![0-9_^])([0-9]+){_SPACE}+([0-9]+)/([0-9]+)")
_UNIT_WORDS = re.compile(r"(?<=[0-9}])\s+([A-Za-z]{4,}(?:\s+[A-Za-z]+)*)$")
_UNIT = (
    r"(?:[mcdk]?m|in|ft|yd|mi|[mk]?g|lbs?|oz|[mcd]?[lL]|m?s|secs?|mins?|hrs?|h"
    r"|[kM]?Hz|[kM]?[JNW]|k?Pa|[mk]?[AV]|mol|[mk]ph)"
    r"(?:\^-?[0-9]|\^\{-?[0-9]\}|[²³])?"
)
_UNITS = re.compile(rf"(?<=[0-9}}])(?:{_SPACE})+({_UNIT}(?:(?:/|\\cdot|·|\*|\s)+{_UNIT})*)$")
_NO_UNIT = re.compile(
    r"\b(?:and|or|not|plus|minus|times|over|half|halves|squared|cubed|mod"
    r"|(?:hundred|thousand|million|billion|trillion|dozen)s?)\b"
)
_APART = re.compile(rf"(?<=[0-9])(?<![_^][0-9])(?:{_IGNORED.pattern})+(?=[0-9])")
_DECIMAL = re.compile(r"[.eE%]")
"""Marks of a number that may be a rounding, or of a percentage, which has two values."""
_WORDS = re.compile(r"[A-Za-z][A-Za-z\s]{3,}|(?i:yes|no)")
_BASE = re.compile(r"[0-9A-Za-z]+_\{?([0-9]+)\}?")
_HALF_OF_DAY = re.compile(r".*[0-9]([AaPp])\.?[Mm]\.?")
_SET = re.compile(r"\\\{[^(),]*,[^()]*\\\}")
_TUPLE = re.compile(r"\([^(),]*,[^()]*\)")


@dataclass(frozen=True)
class RewardMathFn:
    r"""Reward for the answer in the last `\boxed{}` of a text, which is required.

    The task's `ground_truth` is a text, a number, or a list of accepted alternatives; a text may be a whole solution
    with a box of its own. math-verify parses everything but plain text and numbers; values are compared exactly,
    however small or close to each other. Only decimals may be rounded: they must agree to six places, or below 0.0001
    in six digits, so `0.333333` is 1/3 and `0.333` is not. Percent and degree signs, currencies and units are ignored,
    as graders of the MATH dataset do: `10 cm` equals `10`, and also `10 m`.
    """

    config: RewardConfig = field(default_factory=RewardConfig)
    deadline_s: float = 5.0
    """CPU seconds for each comparison by math-verify."""

    def __call__(self, task_info: Task | RewardInput, action: object = None) -> RewardOutput:
        """Judge `action` for a task.

        Raises:
            RewardError: if the task has no usable `ground_truth`.
            MissingDependencyError: without math-verify, even if the answer could be compared as text.
        """
        check_installed()
        given = RewardInput.of(task_info, action)
        golds = [_gold(text) for text in texts_of(field_of(given.task_info, "ground_truth", reward=NAME), NAME)]
        answer = last_boxed(after_thinking(text_of_action(given.action, NAME)))
        if not answer:
            why = "empty" if answer is not None else "missing, or its braces do not balance"
            return RewardOutput(self.config.format_error_reward, {"reason": rf"\boxed{{}} is {why}"}, False)
        verdict = self._matches_any(golds, answer)
        metadata = {"extracted": answer, "ground_truth": golds}
        if verdict is None:
            metadata["reason"] = (
                f"not decided within {self.deadline_s:g} s: too long or too costly to compare, or equal in all digits "
                "computed but not proven equal"
            )
            return RewardOutput(self.config.unk_error_reward, metadata, False)
        if not verdict:
            return RewardOutput(self.config.incorrect_reward, metadata, False)
        bonus = self.config.toolcall_bonus if given.task_info.get("has_toolcall") else 0.0
        return RewardOutput(self.config.correct_reward + bonus, metadata, True)

    def _matches_any(self, golds: list[str], answer: str) -> bool | None:
        """Return whether the answer equals any gold; `None` after the first undecided comparison."""
        answer, *golds = [_in_latex(text) for text in (answer, *golds)]
        pairs = [pair for gold in golds for pair in _readings(gold, answer)]
        # `1e-7` may be `1 \cdot 10^{-7}`, or a product with Euler's number.
        pairs += [(_FLOAT.sub(_POWER, one), _FLOAT.sub(_POWER, other)) for one, other in pairs]
        pairs = list(dict.fromkeys(pairs))
        quick = [_quickly_equal(*pair) for pair in pairs]
        if any(quick):
            return True
        undecided = [pair for pair, verdict in zip(pairs, quick, strict=True) if verdict is None]
        for pair in undecided:
            one, other = (re.sub(r"(?<!\\)%", r"\\%", text) for text in _both_as_tuples(*pair))
            verdict = are_equivalent(one, other, self.deadline_s)
            if verdict or verdict is None:
                return verdict
        return False


def _gold(text: str) -> str:
    boxed = last_boxed(text)
    gold = text.strip() if boxed is None else boxed
    if not gold or (gold.lstrip("+-") in ("nan", "inf")):
        raise RewardError(
            f"{NAME} cannot compare an answer with the ground truth {text!r}: give a finite number or text"
        )
    return gold


def _in_latex(text: str) -> str:
    """Return text with its Unicode signs and rare commands in the LaTeX that math-verify reads."""
    for spelling, latex in _SPELLINGS.items():
        text = text.replace(spelling, latex)
    text = _RAISED.sub(lambda found: f"^{{{normalize('NFKC', found[0])}}}".replace("−", "-"), text)
    text = _PART.sub(lambda found: r"\frac{{{}}}{{{}}}".format(*normalize("NFKC", found[0]).split("⁄")), text)
    text = _REPEATING.sub(_repeating_as_fraction, text)
    text = _DEGREES.sub(r"\1(\\frac{\2\\pi}{180})", text)
    return _ROOT.sub(lambda root: rf"\sqrt{{{next(filter(None, root.groups()), '')}}}", text)


def _repeating_as_fraction(found: re.Match[str]) -> str:
    whole, fixed, repeated = found.groups()
    above = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{above}}}{{{(10 ** len(repeated) - 1) * 10 ** len(fixed)}}}"


def _readings(gold: str, answer: str) -> list[tuple[str, str]]:
    """Return readings of both texts in which commas only separate values.

    `100,200` may be one number or two. A short unit such as `m` may be a variable.
    """
    readings = []
    for units in (_UNITS, None):
        texts = [_THOUSANDS.sub("", _digits_apart(_with_units_marked(text, units))) for text in (gold, answer)]
        readings += [(_with_commas(comma, texts[0]), _with_commas(comma, texts[1])) for comma in ("", ", ")]
    return list(dict.fromkeys(readings))


def _with_commas(comma: str, text: str) -> str:
    return _EITHER.sub(lambda number: number[0].replace(",", comma), text)


def _quickly_equal(gold: str, answer: str) -> bool | None:
    """Return whether both are equal as texts or numbers; `None` if deciding it takes mathematics."""
    plain_gold, plain_answer = _plain(gold), _plain(answer)
    if plain_gold == plain_answer:
        return True
    gold_number, answer_number = _number(plain_gold), _number(plain_answer)
    if gold_number is not None and gold_number == answer_number:
        return True
    if gold_number is not None and answer_number is not None:
        is_rounded = _DECIMAL.search(gold) or _DECIMAL.search(answer)
        if not is_rounded or gold_number.denominator == answer_number.denominator == 1:
            return False
    for read in (_BASE.fullmatch, _HALF_OF_DAY.fullmatch):  # to math-verify, they are units
        one, other = read(plain_gold), read(plain_answer)
        if one and other and one[1].lower() != other[1].lower():
            return False
    word = _TEXT.sub(r"\1", gold).strip()
    if _WORDS.fullmatch(word) or (_TEXT.fullmatch(gold) and re.fullmatch("[A-Za-z]{2,}", word)):
        return plain_gold.lower() == plain_answer.lower()  # to mathematics, it is a product of letters in any order
    kinds = {(bool(_SET.fullmatch(text)), bool(_TUPLE.fullmatch(text))) for text in (plain_gold, plain_answer)}
    return False if kinds == {(True, False), (False, True)} else None


def _with_units_marked(text: str, short: re.Pattern[str] | None) -> str:
    r"""Return `18 eggs`, `\text{18 eggs}` or `18 km/h` with the unit as `\text`, which math-verify ignores.

    `short` is the pattern of short units; without it they may be variables.
    """
    whole = _TEXT.fullmatch(text.strip())
    text = whole[1].strip() if whole and whole[1][:1].isdigit() else text.strip()
    words = (short and short.search(text)) or _UNIT_WORDS.search(text)
    if words is None or _NO_UNIT.search(words[1]):
        return text
    return rf"{text[: words.start()]}\text{{ {re.sub('[{}]', '', words[1])}}}"


def _digits_apart(text: str) -> str:
    r"""Return the text with `1 000` as one number, `3 1/2` as a mixed number, and other separate digits apart."""
    text = _GROUPED.sub(lambda found: re.sub(_SPACE, "", found[0]), _BARE.sub(r"\1{\2}{\3}", text))
    return _APART.sub(", ", _MIXED.sub(r"\1\\frac{\2}{\3}", text))


def _both_as_tuples(gold: str, answer: str) -> tuple[str, str]:
    """Return both with named values as tuples, and an answer `3, 4` as a tuple if the gold is one.

    math-verify would read it as a set. A gold `3, 4` stays, since it may list all solutions.
    """
    gold, answer = _by_name(gold), _by_name(answer)
    values = _values(answer)
    if _TUPLE.fullmatch(_plain(gold)) and not _TUPLE.fullmatch(_plain(answer)) and len(values) > 1:
        return gold, f"({','.join(values)})"
    return gold, answer


def _by_name(text: str) -> str:
    """Return `x=3, y=4` and `(y,x)=(4,3)` as `(3,4)`; any other text unchanged, such as the solutions `x=3, x=4`."""
    found = _ASSIGNED_TUPLE.fullmatch(_plain(text))
    if found is not None:
        names, values = found[1].split(","), found[2].split(",")
    else:
        parts = [_ASSIGNED.fullmatch(part) for part in _values(text)]
        names = [part[1] for part in parts if part]
        values = [part[2] for part in parts if part]
        if len(names) < len(parts):
            return text
    if not len(set(names)) == len(names) == len(values) > 1:
        return text
    return f"({','.join(value for _, value in sorted(zip(names, values, strict=True)))})"


def _values(text: str) -> list[str]:
    """Return the parts between commas; the text itself if it has brackets."""
    return [text] if re.search(r"[()\[\]]|\\\{", text) else _AND.sub(",", text).split(",")


def _plain(text: str) -> str:
    """Return text with one spelling of everything that LaTeX spells in several ways."""
    text = _TEXT.sub(r"\1", text.strip().removesuffix("."))
    return (
        _IGNORED.sub("", text)
        .removeprefix(r"\approx")
        .replace("dfrac", "frac")
        .replace("tfrac", "frac")
        .replace("{,}", ",")
        .replace(r"\varnothing", r"\emptyset")
    )


def _number(text: str) -> Fraction | None:
    """Return the exact value of an integer, a decimal, or a fraction of integers."""
    if len(text) > 400:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text.removesuffix("."))
    fraction = _FRACTION.fullmatch(text)
    if fraction is None:
        return None
    sign, *parts = fraction.groups()
    numerator, denominator = (int(part) for part in parts if part)
    return Fraction(numerator, denominator) * (-1 if sign else 1) if denominator else None


# Comparison by math-verify


def are_equivalent(gold: str, answer: str, deadline_s: float = 5.0) -> bool | None:
    """Return whether two LaTeX answers are equal; `None` if undecided within `deadline_s` CPU seconds.

    The order matters: the answer "4" is right for the gold "x=4". Safe to call from many threads.

    Raises:
        MissingDependencyError: without math-verify.
        SandboxError: if no worker can be started.
    """
    if max(len(gold), len(answer)) > MAX_CHARS:
        return None
    workers = _workers(os.getpid())
    worker = workers.get()
    try:
        if worker is None or not worker.is_alive():
            worker = _new_worker()
        reply = worker.ask({"gold": gold, "answer": answer, "deadline_s": deadline_s})
        if reply is None:
            return None
        if reply["last"]:
            worker.end()
        equal: bool | None = reply["equal"]
        return equal
    finally:
        workers.put(worker)


@cache
def check_installed() -> None:
    """Check that math-verify is installed.

    Raises:
        MissingDependencyError: without math-verify.
    """
    if find_spec("math_verify") is None:
        raise MissingDependencyError.of("math-verify", "math", "comparing mathematical answers")


@cache
def _workers(pid: int) -> LifoQueue[Worker | None]:
    """Return the workers of this process, started on demand: a fork must not share its parent's."""
    workers: LifoQueue[Worker | None] = LifoQueue()
    for _ in range(NUM_WORKERS):
        workers.put(None)

    @atexit.register
    def end_all() -> None:
        while os.getpid() == pid and not workers.empty():
            if worker := workers.get_nowait():
                worker.end()

    return workers


def _new_worker() -> Worker:
    check_installed()
    found = find_spec("math_verify")
    assert found
    assert found.origin
    return Worker(_PROGRAM.read_text(), packages=Path(found.origin).parents[1], memory_mb=4096)
