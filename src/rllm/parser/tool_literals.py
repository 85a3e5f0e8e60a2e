"""Arguments of tool calls that are literals of another language than JSON: Python's, or Gemma's."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rllm.parser.tool_json import is_object

_WORD = re.compile(r"[^\s\"'<>{}\[\](),:=]+")
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def _unescaped(match: re.Match[str]) -> str:
    body = match[1]
    return chr(int(body[1:], 16)) if len(body) > 1 else _ESCAPES.get(body, match[0])


def _of_python(match: re.Match[str]) -> str:
    text = _ESCAPE.sub(_unescaped, match[0][1:-1])
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON escapes characters as two halves


def _of_gemma(match: re.Match[str]) -> str:
    return match[1]


@dataclass(frozen=True, slots=True)
class _Syntax:
    """Differences of a syntax from JSON's."""

    string: re.Pattern[str]
    text_of: Callable[[re.Match[str]], str]
    assign: str
    """Sign between a key and its value, where the key is a bare word."""


_QUOTED = r"'[^'\\]*(?:\\.[^'\\]*)*'"
_PYTHON = _Syntax(re.compile(_QUOTED + "|" + _QUOTED.replace("'", '"'), re.DOTALL), _of_python, "=")
_GEMMA = _Syntax(re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL), _of_gemma, ":")
_CLOSING = {"{": "}", "[": "]", "(": ")"}


def python_arguments(text: str, position: int) -> tuple[str, int] | None:
    """Return the keyword arguments after an opening bracket as a JSON object, and the end of the call."""
    return _object_until(text, position, ")", _PYTHON)


def gemma_object(text: str, position: int) -> tuple[str, int] | None:
    """Return the object in Gemma's syntax that begins here as JSON, and its end."""
    return _object_until(text, position + 1, "}", _GEMMA)


def _object_until(text: str, position: int, closing: str, syntax: _Syntax) -> tuple[str, int] | None:
    """Return the keys and values before a closing bracket as a JSON object, and the place after the bracket."""
    found = _json_until(text, position, closing, syntax)
    return (f"{{{found[0]}}}", found[1]) if found and is_object(f"{{{found[0]}}}") else None


def python_json(text: str) -> str | None:
    """Return a list or dictionary in Python's syntax as JSON; `None` if it is not one."""
    if text[:1] not in ("[", "{"):
        return None
    found = _json_until(text, 1, _CLOSING[text[0]], _PYTHON)
    written = f"{text[0]}{found[0]}{_CLOSING[text[0]]}" if found and found[1] == len(text) else ""
    return written if is_object(f'{{"": {written}}}') else None


def _json_until(text: str, position: int, closing: str, syntax: _Syntax) -> tuple[str, int] | None:
    """Return the text before a closing bracket with its literals as JSON, and the place after the bracket."""
    written, closings = list[str](), [closing]
    while True:
        position = end_of_space(text, position)
        sign = text[position : position + 1]
        if string := syntax.string.match(text, position):
            written.append(json.dumps(syntax.text_of(string), ensure_ascii=False))
            position = string.end()
        elif word := _WORD.match(text, position):
            position = end_of_space(text, word.end())
            is_key = text[position : position + 1] == syntax.assign
            literal = json.dumps(word[0], ensure_ascii=False) + ": " if is_key else _literal(word[0])
            if literal is None:
                return None
            written.append(literal)
            position += is_key
        elif sign == closings[-1]:
            position += 1
            closings.pop()
            if not closings:
                return "".join(written), position
            written.append("]" if sign == ")" else sign)
        elif sign in ("{", "[", "(", ",", ":"):
            position += 1
            closings += [_CLOSING[sign]] if sign in _CLOSING else []
            written.append("[" if sign == "(" else f"{sign} " if sign in ",:" else sign)
        else:
            return None


def end_of_space(text: str, position: int, limit: int = sys.maxsize) -> int:
    """Return the position after white space of any kind."""
    space = _SPACE.match(text, position, limit)
    return space.end() if space else position


def _literal(word: str) -> str | None:
    """Return a number or constant as JSON; `None` if the word is neither."""
    if word.lower() in _CONSTANTS:
        return _CONSTANTS[word.lower()]
    return word if is_object(f'{{"": {word}}}') else None
