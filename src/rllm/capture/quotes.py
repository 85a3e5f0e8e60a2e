"""Search for answers that come back in the messages of later calls, as a program writes them there.

A text is compared by its letters and digits alone. White space, line breaks, punctuation, Markdown, tags, and the
escapes of JSON, HTML and XML differ between an answer and the message that quotes it; the letters do not.

- A text of `QUOTE` letters or more comes back where a run of that many of them stands in a message, so one that was cut
  short, wrapped, indented or put into a longer text is found.
- A shorter one of `LINE` letters or more comes back as lines, as strings in quotes, or behind a label such as "Plan:".
- One shorter than that ("4", "yes") comes back as a whole message or part of one.

Texts that the call's own prompt has already are not a sign: a title repeats the question, and so do later messages.
Neither are messages that an earlier call had already, or text inside the model's other answers.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rllm.types import Message, Trace, text_of

QUOTE = 48
"""Letters and digits that a quotation from a longer text has in common with it: about nine English words."""
LINE = 12
"""Letters and digits of the shortest text that is looked for in the lines of a message."""
_BLOCK = QUOTE // 2
"""Letters of a block. Messages are indexed by blocks, end to end: each run of `QUOTE` letters has a whole one in it."""
_LONGEST_RUN = 4 * QUOTE
"""Letters of a quotation that are compared with the call's own prompt; characters of a piece that may be a line."""

_WORD = re.compile(r"[^\W_]+")
_ESCAPE = re.compile(r"(?<!\\)\\++(?:u([0-9a-fA-F]{4})|([nrt\"'/]))")
_BREAK = re.compile(r"""[\n\r"`]|(?<!\w)'|'(?!\w)|</?[A-Za-z][^<>\n]*>""")
_NUMBER = re.compile(r"(?<!\d)\d++[.):]\s")
_FENCE = re.compile(r"```\w*\n(.*)```", re.DOTALL)


class LaterMessages:
    """Messages of a session's calls, from the last call backwards, in which the answers of earlier ones are looked for.

    Each distinct text is read once, so the cost grows with the characters of the session and not with their square.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        """Args:
        traces: the session's, in the order in which the calls began.
        """
        self._traces = traces
        self._answers = {text_of(trace.response).strip() for trace in traces}
        self._messages = [[*map(_role_and_texts, trace.messages)] for trace in traces]
        self._begun: dict[tuple[bool, str], int] = {}
        """The first call that has a text, by whether the model is its author, and the text."""
        for number, messages in enumerate(self._messages):
            for is_answer, texts in messages:
                for text in texts:
                    self._begun.setdefault((is_answer, text), number)
        self._added: set[tuple[bool, str]] = set()
        # Each of these has the latest call that was the first with such a text.
        self._whole_answers: dict[str, int] = {}
        self._wholes: dict[str, int] = {}
        self._lines: dict[str, int] = {}
        self._blocks: dict[str, tuple[int, str, int]] = {}
        """The call, and where the block is: the letters of the text, and the place in them."""

    def add(self, number: int) -> None:
        """Index the messages of a call."""
        for is_answer, texts in self._messages[number]:
            for text in texts:
                if (is_answer, text) not in self._added:
                    self._added.add((is_answer, text))
                    self._add(text, is_answer, self._begun[is_answer, text])

    def _add(self, text: str, is_answer: bool, number: int) -> None:
        bare = text.strip()
        if is_answer:
            _keep_latest(self._whole_answers, bare, number)
        if is_answer and bare in self._answers:
            return
        pieces = _pieces(text)
        letters = "".join(map(_letters, pieces))
        _keep_latest(self._wholes, letters, number)
        for line in _lines(pieces):
            _keep_latest(self._lines, line, number)
        for place in range(0, len(letters) - _BLOCK + 1, _BLOCK):
            block = letters[place : place + _BLOCK]
            if block not in self._blocks or self._blocks[block][0] < number:
                self._blocks[block] = (number, letters, place)

    def have_answer_of(self, number: int) -> bool:
        """Return whether the answer of a call comes back in a message that was added and that no earlier call had."""
        answer = text_of(self._traces[number].response).strip()
        if not answer:
            return False
        if self._whole_answers.get(answer, -1) > number:
            return True
        own = _Prompt(text for _, texts in self._messages[number] for text in texts)
        return any(self._has(_pieces(reading), own, number) for reading in _readings(answer))

    def have_something_of(self, numbers: Sequence[int]) -> bool:
        """Return whether an answer of these calls, or a result of tools in their messages, is in the messages added."""
        if any(map(self.have_answer_of, numbers)):
            return True
        messages = [message for number in numbers for message in self._traces[number].messages]
        results = [message.get("content") for message in messages if message.get("role") == "tool"]
        texts = {text for result in results for text in _texts_in(result)}
        return any(self._has(_pieces(text), _Prompt(iter(())), -1) for text in texts)

    def _has(self, pieces: Sequence[str], own: _Prompt, number: int) -> bool:
        lines = [line for line in map(_letters, pieces) if line]
        letters = "".join(lines)
        if not letters:
            return False
        if len(letters) >= QUOTE:
            return self._has_run_of(letters, own, number)
        is_back = self._wholes.get(letters, -1) > number or (
            len(letters) >= LINE and all(self._lines.get(line, -1) > number for line in lines)
        )
        return is_back and not own.has(letters)

    def _has_run_of(self, letters: str, own: _Prompt, number: int) -> bool:
        place = 0
        while place <= len(letters) - _BLOCK:
            latest, there, at = self._blocks.get(letters[place : place + _BLOCK], (-1, "", 0))
            if latest <= number:
                place += 1
                continue
            start, stop = _common_run(letters, place, there, at)
            if stop - start < QUOTE:
                place += 1
            elif not own.has(letters[start:stop]):
                return True
            else:
                place = stop
        return False


class _Prompt:
    """A call's own prompt, read when it is first compared with."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts
        self._read: tuple[set[str], str] | None = None

    def has(self, letters: str) -> bool:
        """Return whether it has a text anywhere, or a very short one as a line."""
        if self._read is None:
            each = [_pieces(text) for text in self._texts]
            whole = ["".join(map(_letters, pieces)) for pieces in each]
            self._read = {line for pieces in each for line in _lines(pieces)}, "\n".join(whole)
        return letters in (self._read[1] if len(letters) >= LINE else self._read[0])


def _keep_latest(numbers: dict[str, int], text: str, number: int) -> None:
    numbers[text] = max(numbers.get(text, -1), number)


def _role_and_texts(message: Message) -> tuple[bool, list[str]]:
    if not isinstance(message, dict):
        return False, []
    if message.get("role") == "assistant":
        return True, [text_of(message)]
    return False, [*_texts_in(message.get("content"))]


def _texts_in(content: Any) -> Iterator[str]:
    """Return the texts of a message's content, those inside of parts included; not the data of images and files."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            yield from _texts_in(part)
    elif isinstance(content, dict):
        for name in ("text", "content", "output"):
            yield from _texts_in(content.get(name))


def _readings(answer: str) -> Iterator[str]:
    """Return an answer, the part after its reasoning, and the strings in it where it is JSON."""
    yield answer
    _, mark, rest = answer.rpartition("</think>")
    if mark:
        yield rest
    fenced = _FENCE.search(rest)
    try:
        parsed = json.loads(fenced[1] if fenced else rest)
    except (ValueError, RecursionError):
        return
    if isinstance(parsed, dict | list):
        yield from (text for text in _strings_in(parsed) if len(_letters(text)) >= LINE)


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(item)


def _pieces(text: str) -> list[str]:
    """Split a text, without its escapes, at line breaks, quotation marks and tags."""
    if "\\" in text:
        text = _ESCAPE.sub(_unescaped, text)
    if "&" in text:
        text = html.unescape(text)
    return _BREAK.split(text)


def _unescaped(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 16)) if escape[1] else {"n": "\n", "r": "\n", "t": "\t"}.get(escape[2], escape[2])


def _letters(text: str) -> str:
    return "".join(_WORD.findall(text))


def _lines(pieces: Sequence[str]) -> Iterator[str]:
    """Return the letters of each short piece, also of it without a number and without a label before it."""
    for piece in pieces:
        if len(piece) <= _LONGEST_RUN:
            forms = {_letters(piece), _letters(_NUMBER.sub("", piece, 1)), _letters(piece.partition(": ")[2])}
            yield from (form for form in forms if 0 < len(form) < QUOTE)


def _common_run(one: str, place: int, other: str, at: int) -> tuple[int, int]:
    """Return start and stop, in `one`, of the run of letters around these places that both texts have."""
    start = place
    while start > 0 and at > 0 and place - start < _BLOCK and one[start - 1] == other[at - 1]:
        start, at = start - 1, at - 1
    stop = start
    while stop - start < min(_LONGEST_RUN, len(one) - start, len(other) - at) and one[stop] == other[at + stop - start]:
        stop += 1
    return start, stop
