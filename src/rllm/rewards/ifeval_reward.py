"""The reward for verifiable instructions: the 25 kinds of IFEval, https://arxiv.org/abs/2311.07911.

Sentences are counted by rules and not by NLTK's trained model, so a text near the limit may be scored differently.
"""

from __future__ import annotations

import inspect
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import TypeAlias

from rllm.errors import MissingDependencyError, RewardError
from rllm.rewards.reward_types import RewardOutput, after_thinking, field_of, text_of_action
from rllm.types import JSONMapping, Task

NAME = "the reward for instructions"

Check: TypeAlias = Callable[..., bool]
_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {"less than": operator.lt, "at least": operator.ge}


def ifeval_reward_fn(task_info: Task, action: object) -> RewardOutput:
    """Return 1.0 if the text follows all of the task's `instructions`, each an `id` and its arguments, else 0.0.

    The reward is the strict verdict. The metadata has numbers of `instructions` and of those that are `followed`;
    `followed_loose` and `all_followed_loose` also accept the text without its first line, its last, or its asterisks.

    Raises:
        RewardError: if the task has no instructions, or one is unknown or lacks an argument.
        MissingDependencyError: if one is about a language, without langdetect.
    """
    instructions: Sequence[JSONMapping] = field_of(task_info, "instructions", reward=NAME)
    text = after_thinking(text_of_action(action, NAME))
    strict = [is_followed(instruction, text) for instruction in instructions]
    loose = [any(is_followed(instruction, variant) for variant in _variants(text)) for instruction in instructions]
    numbers = {
        "instructions": len(instructions),
        "followed": sum(strict),
        "followed_loose": sum(loose),
        "all_followed_loose": float(all(loose)),
    }
    ignored = [instruction["id"] for instruction, done in zip(instructions, strict, strict=True) if not done]
    return RewardOutput(float(all(strict)), {**numbers, "not_followed": ignored}, all(strict))


def is_followed(instruction: JSONMapping, text: str) -> bool:
    """Return whether a text follows an instruction; an empty text follows none."""
    arguments = {name: value for name, value in instruction.items() if name != "id"}
    check = INSTRUCTIONS.get(instruction["id"])
    if check is None:
        raise RewardError(f"{NAME} does not know {instruction['id']!r}, only {', '.join(INSTRUCTIONS)}")
    try:
        call = inspect.signature(check).bind(text, **arguments)
    except TypeError as error:
        raise RewardError(f"{NAME}: the arguments of {instruction['id']!r} are {sorted(arguments)}: {error}") from None
    return bool(text.strip()) and check(*call.args, **call.kwargs)


def _variants(text: str) -> Iterator[str]:
    """Yield a text without an introduction, a closing line, or marks of emphasis."""
    lines = text.split("\n")
    for part in (lines, lines[1:], lines[:-1], lines[1:-1]):
        variant = "\n".join(part)
        variant = variant if part is lines else variant.strip()
        yield from (variant, variant.replace("*", ""))


def _compared(count: int, relation: str, limit: int) -> bool:
    if relation not in _RELATIONS:
        raise RewardError(f"{NAME}: the relation is {relation!r}, not {' or '.join(map(repr, _RELATIONS))}")
    return _RELATIONS[relation](count, limit)


@cache
def check_installed() -> None:
    """Check that langdetect is installed.

    Raises:
        MissingDependencyError: without langdetect.
    """
    if find_spec("langdetect") is None:
        raise MissingDependencyError.of("langdetect", "ifeval", "checking the language of a text")


def _is_in_language(text: str, language: str) -> bool:
    """Return whether a text is in a language, given by its ISO 639-1 code; a text without letters counts as such."""
    check_installed()
    import langdetect

    langdetect.DetectorFactory.seed = 0  # otherwise the verdict on a short text changes from call to call
    try:
        return bool(langdetect.detect(text) == language)
    except langdetect.LangDetectException:
        return True


_BETWEEN_WORDS = re.compile(r"--|[\s,;:?!@#$%&()\[\]{}<>\"“”]|['’](?=(?:S|M|D|LL|RE|VE)\b)", re.IGNORECASE)


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    words = filter(None, _BETWEEN_WORDS.split(text))
    return _compared(sum(word.isupper() for word in words), capital_relation, capital_frequency)


# Lengths

_ABBREVIATIONS = frozenset(
    "dr mr mrs ms prof st sr jr inc ltd co corp vs gen sen rep gov col capt lt sgt e.g i.e u.s u.k u.n d.c a.m p.m "
    "ph.d jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
_DOTTED = re.compile(r"[a-z](?:\.[a-z])*")
_STARTERS = frozenset("he she it they we you this that these those the there in but however if when for a".split())
_OPENING, _CLOSING = "\"'“‘([*_", "\"'”’)]*_"


def count_sentences(text: str) -> int:
    """Return the number of sentences: a mark and a space end one.

    After an abbreviation or an initial they do so only if a common first word follows; after an ellipsis or a number
    not before lower case.
    """
    words = text.split()
    return bool(words) + sum(_ends_sentence(word, following) for word, following in pairwise(words))


def _ends_sentence(word: str, following: str) -> bool:
    marked = word.rstrip(_CLOSING)
    bare = marked.rstrip(".!?")
    mark, bare = marked[len(bare) :], bare.lstrip(_OPENING).lower()
    if mark == "." and (bare in _ABBREVIATIONS or (_DOTTED.fullmatch(bare) and bare != "i")):
        return following[0].isupper() and following.lower() in _STARTERS
    return mark != "" and not ((mark.startswith("..") or bare.isdigit()) and following[0].islower())


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Return whether `***` separates this number of paragraphs; it may also be above the first and below the last."""
    parts = _parts(text, "***")
    return parts is not None and len(parts) == num_paragraphs


def _parts(text: str, separator: str) -> list[str] | None:
    """Return the parts of a text without empty ones at its ends; `None` if another is empty."""
    parts = [part.strip() for part in text.split(separator)]
    inner = parts[not parts[0] : len(parts) - (not parts[-1])]
    return inner if all(inner) else None


_FIRST_WORD = re.compile(r"'*\"*([^\s.,?!'\"]*)")


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return whether empty lines separate this number of paragraphs, and the nth begins with the word."""
    paragraphs = [part.strip() for part in text.split("\n\n")]
    num_written = sum(map(bool, paragraphs))
    if num_written != num_paragraphs or not 1 <= nth_paragraph <= num_written or not paragraphs[nth_paragraph - 1]:
        return False
    found = _FIRST_WORD.match(paragraphs[nth_paragraph - 1])
    return found is not None and found[1].lower() == first_word.lower()


# Content and format

_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    return re.search(_POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    lines = [line.lstrip() for line in text.split("\n")]
    return sum(bool(re.match(r"\*[^*]|-", line)) for line in lines) == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
    single = re.findall(r"\*([^\n*]*)(\*?)", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    count = sum(bool(inside.strip() and end) for inside, end in single) + sum(bool(inside.strip()) for inside in double)
    return count >= num_highlights


def _is_json(text: str) -> bool:
    text = re.sub(r"\A```(?:json)?|```\Z", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and start + 2 < end and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(text: str) -> bool:
    parts = _parts(text, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


INSTRUCTIONS: Mapping[str, Check] = {
    "keywords:existence": lambda text, keywords: all(keyword.lower() in text.lower() for keyword in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compared(
        text.lower().count(keyword.strip().lower()), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compared(
        text.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "language:response_language": _is_in_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _compared(
        count_sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: _compared(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        # an open bracket is read to the end of its line only once
        re.findall(r"\[[^\]\n]*(\]?)", text).count("]") >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text: any(
        f"My answer is {answer}." in text for answer in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text: text.isupper() and _is_in_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and _is_in_language(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""Checks by the ids of the dataset: functions of the text and the instruction's arguments."""
