"""An attacker writes the text: no regular expression of the package takes more than linear time for it.

Every pattern in `src` is found by its syntax tree, and run over texts made to cause backtracking: single characters, short words
and its own literal parts, repeated. Time is that of this thread on its processor, and far below what anything quadratic
needs for texts of this length, so a busy machine does not matter.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import re._constants as codes
import re._parser as parser
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rllm
from rllm.parser.answer import visible
from rllm.parser.tool_formats import TOOL_FORMATS
from rllm.parser.tool_parser import tool_parser
from rllm.rewards.countdown_reward import countdown_reward_fn
from rllm.rewards.math_reward import RewardMathFn
from rllm.rewards.reward_types import python_blocks
from rllm.rewards.search_reward import chosen_letter, f1_score, stated_answer

SOURCE = Path(rllm.__file__).parent
LENGTHS = (18, 400, 6_000)
"""Increasing, so that an exponential pattern is found before it takes too long."""
MOST_S = 0.006
"""A quadratic pattern takes 0.02 s or more for the longest of them, a linear one 0.3 ms."""
UNITS = (
    *" \n\ta1(){}[]<>\"'\\*_.,:-=/`$|%√",
    *(" \n", "\n\n ", "a ", "1 ", "1,", "1.", "1,000", "a.b", "a\n", "\\ ", "{}", "()", "**", "``", "a,", "A) ", "\\!"),
)
METHODS = ("compile", "sub", "subn", "search", "match", "fullmatch", "findall", "finditer", "split")
OUR_OWN_TEXT = {
    "config/loading.py": "errors of OmegaConf about settings of the user's command line",
}
"""Files whose patterns match trusted text only."""


@dataclass(frozen=True)
class Found:
    place: str
    pattern: Any
    """Text, or a compiled pattern."""
    searches: bool
    """False if it is matched at one position only."""


class _Names(dict[str, Any]):
    """Names of a module; one that exists only while a function runs is replaced by a word."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, _Word("word"))


class _Word(str):
    def __getattr__(self, name: str) -> _Word:
        return self


def _names(path: Path) -> _Names:
    name = ".".join(("rllm", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    try:
        return _Names(vars(importlib.import_module(name)))
    except Exception:  # an optional package is missing, or a file of a new project has no key
        return _Names(re=re)


def _patterns() -> Iterator[Found]:
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text()
        if re.search(rf"\bre\.(?:{'|'.join(METHODS)})\(", source) and str(path.relative_to(SOURCE)) not in OUR_OWN_TEXT:
            yield from _patterns_of(path, source)


def _patterns_of(path: Path, source: str) -> Iterator[Found]:
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _method(node)]
    needs_names = any(isinstance(node, ast.Name) for call in calls for node in ast.walk(call.args[0]))
    names = _names(path) if needs_names else _Names(re=re)
    targets = dict(pair for node in ast.walk(tree) if isinstance(node, ast.Assign) for pair in _assigned(node))
    for call in calls:
        pattern, *others = call.args
        if ast.unparse(pattern) in ESCAPED:
            continue
        given = [keyword.value for keyword in call.keywords if keyword.arg == "flags"]
        given += others if _method(call) == "compile" else []
        compiled = re.compile(_value(pattern, names), sum(_value(flags, names) for flags in given))
        matched_only = {"match", "fullmatch"}
        if _method(call) == "compile":
            used = set(re.findall(rf"\b{targets[call]}\b(?:\.(\w+)|(?! =))", source)) if call in targets else {""}
            matched_only |= {"pattern"}
        else:
            used = {_method(call)}
        yield Found(f"{path.relative_to(SOURCE)}:{call.lineno}", compiled, searches=not used <= matched_only)


ESCAPED = {"b''.join(forms)"}
"""Patterns of escaped characters in a row, without repetition: the upstream's key."""


def _method(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(value=ast.Name(id="re"), attr=name) if name in METHODS:
            return name
    return ""


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, str]]:
    match node.targets[0], node.value:
        case ast.Name(id=name), value:
            yield value, name


def _value(node: ast.expr, names: _Names) -> Any:
    return eval(compile(ast.Expression(node), "", "eval"), {}, names)


@cache
def _literals(pattern: re.Pattern[Any]) -> tuple[str, ...]:
    """Return the literal parts of a pattern, and beginnings of a text that it matches."""
    runs: list[str] = []
    if isinstance(pattern.pattern, bytes):
        sample = _sample(parser.parse(pattern.pattern.decode("latin-1"), pattern.flags & ~re.UNICODE), runs)
    else:
        sample = _sample(parser.parse(pattern.pattern, pattern.flags), runs)
    starts = [sample[: len(sample) // 2], sample[:-1], sample]
    return tuple(text for text in dict.fromkeys([*starts, *runs]) if text)[:8]


def _sample(parsed: Any, runs: list[str]) -> str:
    made, run = "", ""
    for code, value in parsed:
        piece = _sample_of(code, value, runs)
        run = run + piece if code is codes.LITERAL else ""
        if len(run) > 1:
            runs[:] = [other for other in runs if not run.startswith(other)] + [run]
        made += piece
    return made


def _sample_of(code: Any, value: Any, runs: list[str]) -> str:
    if code is codes.LITERAL:
        return chr(value)
    if code is codes.IN:
        return _member(value)
    if code is codes.ANY or code is codes.NOT_LITERAL:
        return "x"
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        return _sample(value[2], runs) * max(1, min(value[0], 3))
    if code is codes.SUBPATTERN:
        return _sample(value[3], runs)
    if code is codes.ATOMIC_GROUP:
        return _sample(value, runs)
    if code is codes.BRANCH:
        return next(iter([_sample(branch, runs) for branch in value[1]]))
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        _sample(value[1], runs)
    return ""


def _member(members: Any) -> str:
    for code, value in members:
        if code is codes.LITERAL:
            return chr(value)
        if code is codes.RANGE:
            return chr(value[0])
        if code is codes.CATEGORY:
            return {codes.CATEGORY_SPACE: " ", codes.CATEGORY_DIGIT: "1", codes.CATEGORY_WORD: "a"}.get(value, "-")
    return "x"


@cache
def _repeated(unit: str, length: int) -> str:
    return unit * (length // len(unit) + 1)


def _texts(pattern: re.Pattern[Any], length: int) -> Iterator[str]:
    literals = _literals(pattern)
    for unit in (*UNITS, *literals):
        yield _repeated(unit, length)
    for start in literals[:4]:
        for unit in " \na1":
            yield start + _repeated(unit, length) + "!"


def _seconds(found: Found, text: Any) -> float:
    started = time.thread_time()
    if found.searches:
        for _ in found.pattern.finditer(text):
            pass
    else:
        found.pattern.match(text)
        found.pattern.fullmatch(text)
    return time.thread_time() - started


def _least(found: Found, text: Any) -> float:
    """Return the least of several times, with pauses between them: a virtual machine that is paused counts as busy."""
    least = _seconds(found, text)
    for _ in range(9):
        time.sleep(0.02)
        least = min(least, _seconds(found, text))
    return least


def _quarter(text: Any) -> Any:
    """Return a quarter of the text, with its end: it takes a quarter of linear time, or a sixteenth of quadratic."""
    return text[: len(text) // 4] + text[-1:]


def _slow_text(found: Found) -> str:
    """Return a text for which a pattern takes more than linear time, if one is found."""
    for length in LENGTHS:
        for text in _texts(found.pattern, length):
            given = text.encode() if isinstance(found.pattern.pattern, bytes) else text
            if _seconds(found, given) > MOST_S and _least(found, given) > max(
                MOST_S, 8 * _least(found, _quarter(given))
            ):
                return f"{length} characters that begin {text[:30]!r}"
    return ""


@pytest.mark.slow
def test_patterns_do_not_backtrack_on_hostile_text() -> None:
    found = list(_patterns())
    assert len(found) > 100
    slow = {item.place: (item.pattern.pattern, text) for item in found if (text := _slow_text(item))}
    assert slow == {}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"\s*$", r"(a|a)*b", r"(?m)^\s*def", r"\d+,\d+x"])
def test_search_finds_slow_patterns(pattern: str) -> None:
    assert _slow_text(Found("here", re.compile(pattern), True))


READERS: dict[str, Callable[[str], Any]] = {
    **{name: tool_parser(name).parse for name in ("hermes", "qwen3_coder", "llama3_json", "mistral", "r1", "harmony")},
    "multiple choice": lambda text: chosen_letter(f"A {text} B", ["one", "two"]),
    "short answers": lambda text: f1_score(stated_answer(text), text),
    "mathematics": lambda text: RewardMathFn()({"ground_truth": "3"}, rf"\boxed{{1{text}}}"),
    "countdown": lambda text: countdown_reward_fn({"target": 3, "nums": [1, 2]}, f"<answer>{text}</answer>"),
    "code": lambda text: python_blocks(f"```python\n{text}\n```"),
    "streams": visible,
}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_answers_are_parsed_in_linear_time(reader: str) -> None:
    markup = tool_parser(reader).markup if reader in TOOL_FORMATS else ("\\boxed{", "<answer>", "```\n", "A, B, ", "1 ")
    for unit in [*markup, *(mark + '{"' for mark in markup), *(mark + '{"a":' for mark in markup), '{"a":', " ", "["]:
        started = time.thread_time()
        READERS[reader](_repeated(unit, 25_000))
        assert time.thread_time() - started < 0.5, unit  # quadratic code takes 2.5 s
