"""Calls of an agent's program that are not part of its task, such as a request for a title.

Programs do not declare them. A call is a candidate if it asks for a title and nothing else, or if it has no tools and
begins a conversation of its own while other calls of the session have tools. It belongs to the task after all if a call
of the task continues its tokens, or quotes its answer in a message: a summary that replaces the history, a sub-agent's
result, a plan. An answer that is quoted only in the messages of side calls belongs to those. A call that no call of the
task follows belongs to the task, too, if its messages quote an answer of the task or a result of its tools: the program
sums up its findings. A title of the whole conversation cannot be distinguished from that, and does no harm: its tokens
do not influence the reward.

Calls of the author's own code, in this process or in one that knows its session, belong to the task, with tools or
without: a tool may well ask the model something.

Quotations are found by letters and digits alone (`LaterMessages`). White space, line breaks, punctuation, Markdown,
tags, and the escapes of JSON, HTML and XML differ between an answer and the message that quotes it; the letters do not.

- A text of `QUOTE` letters or more is quoted where a message has a run of that many of them, or lines with that many,
  so a quotation that was cut short, wrapped, indented, numbered or put into a longer text is found.
- A shorter one of `LINE` letters or more is quoted as lines, as strings in quotation marks, or after a label such as
  "Plan:".
- A still shorter one ("4", "yes") is quoted as a whole message or part of one.

Texts that the call's own prompt contains are not evidence: a title repeats the question, and so do later messages.
Neither are messages that an earlier call had already, or text inside the model's other answers. An answer of `QUOTE`
letters that repeats one of the task belongs to it, too: a second summary may find nothing new.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from rllm.capture.conversations import arguments_of
from rllm.types import SIDE_CALL_KEY, JSONMapping, Message, Trace, text_of

OWN_KEY = "session_uids"
"""Metadata key of calls whose client names its session itself."""
PROGRAM_KEY = "of_program"
"""Metadata key of calls of a program that was started in a session; its clients are configured to send it."""
TITLE = "title"
"""Reason: the answer was to be a title and nothing else."""
WITHOUT_TOOLS = "without tools"
"""Reason: the call has no tools and begins a conversation of its own, while other calls of the session have tools."""

QUOTE = 48
"""Letters and digits that a quotation has in common with a longer text: about nine English words."""
LINE = 12
"""Letters and digits of the shortest text that is searched for in the lines of a message."""
_BLOCK = QUOTE // 2
"""Letters of a block. Answers are searched for by adjacent blocks: each run of `QUOTE` letters contains a whole one."""
_LONGEST_RUN = 4 * QUOTE
"""Limit for the letters of a quotation that are compared with the call's own prompt, and for the characters of a
line."""

_WORD = re.compile(r"[^\W_]+")
_ESCAPE = re.compile(r"(?<!\\)\\++(?:u([0-9a-fA-F]{4})|([nrt\"'/]))")
_BREAK = re.compile(r"""[\n\r"`]|(?<!\w)'|'(?!\w)|</?[A-Za-z][^<>\n]*>""")
_NUMBER = re.compile(r"(?<!\d)\d++[.):]\s")
_FENCE = re.compile(r"```\w*\n(.*)```", re.DOTALL)


def side_call(request: JSONMapping, *, session_has_tools: bool, is_own: bool = False) -> str | None:
    """Return the reason why a chat request is a side call, as far as this is known before the calls that follow it.

    Args:
        request: The chat request.
        session_has_tools: True if another call of the session has tools.
        is_own: True if the author's code made the call, through a client that names its session itself.
    """
    if is_own:
        return None
    if asks_for_title(request.get("response_format")):
        return TITLE
    if session_has_tools and not request.get("tools") and _begins(request["messages"]):
        return WITHOUT_TOOLS
    return None


def is_own(metadata: JSONMapping) -> bool:
    """Return True if the author's own code made a call with this metadata."""
    return OWN_KEY in metadata and PROGRAM_KEY not in metadata


def side_calls(traces: Sequence[Trace]) -> dict[str, str]:
    """Return the ids of a session's side calls, each with the reason, `TITLE` or `WITHOUT_TOOLS`.

    The result is empty if every call, or no call, is a candidate.
    """
    aside = _candidates(traces)
    if not aside or len(aside) == len(traces):
        return {}
    calls = sorted(traces, key=lambda trace: trace.started_at)
    task = [number for number, call in enumerate(calls) if call.id not in aside]
    for number in range(task[-1] + 1, len(calls)):
        if aside[calls[number].id] == WITHOUT_TOOLS:  # it may sum up the task
            final = LaterMessages(calls)
            final.add(number)
            if final.quote_any_of(task):
                del aside[calls[number].id]
    later = LaterMessages(calls)
    parents: set[str | None] = set()
    for number in reversed(range(len(calls))):
        call = calls[number]
        if call.id in aside and (call.id in parents or later.quote_answer_of(number)):
            del aside[call.id]
        if call.id not in aside:
            parents.add(call.parent_id)
            later.add(number)
    answers = {text_of(call.response).strip() for call in calls if call.id not in aside}
    repeated = {answer for answer in answers if len(_letters(answer)) >= QUOTE}
    for call in calls:
        if aside.get(call.id) == WITHOUT_TOOLS and text_of(call.response).strip() in repeated:
            del aside[call.id]
    return aside


def _candidates(traces: Sequence[Trace]) -> dict[str, str]:
    has_tools = any(trace.tools for trace in traces)
    found: dict[str, str] = {}
    for trace in traces:
        if SIDE_CALL_KEY in trace.metadata:
            found[trace.id] = str(trace.metadata[SIDE_CALL_KEY])
        elif has_tools and not trace.tools and not is_own(trace.metadata) and _begins(trace.messages):
            found[trace.id] = WITHOUT_TOOLS
    return found


def _begins(messages: Sequence[Message]) -> bool:
    """Return True if nothing has been answered yet; False for a prompt of bare token ids, which cannot show it."""
    return bool(messages) and not any(message.get("role") in ("assistant", "tool") for message in messages)


def asks_for_title(response_format: object) -> bool:
    """Return True if the answer is to be an object with a title and nothing else."""
    described = response_format.get("json_schema") if isinstance(response_format, dict) else None
    schema = described.get("schema") if isinstance(described, dict) else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return isinstance(properties, dict) and set(properties) == {"title"}


@dataclass(frozen=True, slots=True)
class _Text:
    """Letters and digits of a text, and of each of its short lines."""

    letters: str
    lines: frozenset[str]

    @classmethod
    def of(cls, text: str) -> _Text:
        pieces = _pieces(text)
        lines = set()
        for piece in pieces:
            if len(piece) <= _LONGEST_RUN:  # with and without a leading number or label
                lines |= {_letters(piece), _letters(_NUMBER.sub("", piece, 1)), _letters(piece.partition(": ")[2])}
        return cls("".join(map(_letters, pieces)), frozenset(line for line in lines if 0 < len(line) < QUOTE))

    def has(self, letters: str) -> bool:
        """Return True if it contains a text anywhere, or a very short one as a line."""
        return letters in (self.letters if len(letters) >= LINE else self.lines)


class LaterMessages:
    """Messages of a session's calls, added from the last call backwards, to search for answers of earlier calls.

    Each distinct text is read once.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        """Prepare the calls of a session, given in the order in which they began."""
        self._traces = traces
        self._answers = {text_of(trace.response).strip() for trace in traces}
        self._messages = [[*map(_role_and_texts, trace.messages)] for trace in traces]
        self._begun: dict[tuple[bool, str], int] = {}
        """Number of the first call that contains a text, keyed by (True if the model wrote it, text)."""
        for number, messages in enumerate(self._messages):
            for is_answer, texts in messages:
                for text in texts:
                    self._begun.setdefault((is_answer, text), number)
        self._added: dict[tuple[bool, str], None] = {}
        self._texts: dict[str, _Text] = {}

    def add(self, number: int) -> None:
        """Include the messages of a call."""
        self._added |= {(is_answer, text): None for is_answer, texts in self._messages[number] for text in texts}

    def only(self, number: int) -> LaterMessages:
        """Restrict the search to the messages of this call."""
        self._added = {}
        self.add(number)
        return self

    def quote_tool_call_of(self, number: int) -> bool:
        """Return True if an added message that no earlier call had quotes an argument of a call's tool calls."""
        readings = chain.from_iterable(map(_readings, arguments_of(self._traces[number].response)))
        return any(self._quote(text, number, []) for text in readings)

    def quote_answer_of(self, number: int) -> bool:
        """Return True if an added message that no earlier call had quotes the answer of a call."""
        answer = text_of(self._traces[number].response).strip()
        if not answer:
            return False
        if any(is_answer and text.strip() == answer for is_answer, text in self._after(number)):
            return True
        own = [self._read(text) for _, texts in self._messages[number] for text in texts]
        return any(self._quote(reading, number, own) for reading in _readings(answer))

    def quote_any_of(self, numbers: Sequence[int]) -> bool:
        """Return True if an added message quotes an answer of these calls, or a tool result in their messages."""
        if any(map(self.quote_answer_of, numbers)):
            return True
        messages = [message for number in numbers for message in self._traces[number].messages]
        results = [message.get("content") for message in messages if message.get("role") == "tool"]
        return any(self._quote(text, -1, []) for text in {text for result in results for text in _texts_in(result)})

    def _after(self, number: int) -> Iterator[tuple[bool, str]]:
        return (key for key in self._added if self._begun[key] > number)

    def _read(self, text: str) -> _Text:
        if text not in self._texts:
            self._texts[text] = _Text.of(text)
        return self._texts[text]

    def _quote(self, text: str, number: int, own: Sequence[_Text]) -> bool:
        """Return True if a message after a call quotes a text that the call's own prompt does not contain."""
        lines = [line for line in map(_letters, _pieces(text)) if line]
        letters = "".join(lines)
        if not letters:
            return False
        later = [
            self._read(other)
            for is_answer, other in self._after(number)
            if not (is_answer and other.strip() in self._answers)
        ]
        if len(letters) >= QUOTE:
            answer = self._read(text)
            return any(
                not any(text.has(run) for text in own) for other in later for run in _runs(letters, other.letters)
            ) or any(_num_alike(answer, other, own) >= QUOTE for other in later)
        is_back = any(other.letters == letters for other in later) or (
            len(letters) >= LINE and all(any(line in other.lines for other in later) for line in lines)
        )
        return is_back and not any(text.has(letters) for text in own)


def _runs(one: str, other: str) -> Iterator[str]:
    """Yield runs of at least `QUOTE` letters that both texts share. Each contains a whole block of the first text."""
    for place in range(0, len(one) - _BLOCK + 1, _BLOCK):
        at = other.find(one[place : place + _BLOCK])
        while at >= 0:
            back = 0
            while back < min(_BLOCK, place, at) and one[place - back - 1] == other[at - back - 1]:
                back += 1
            start, there = place - back, at - back
            size = 0
            while (
                size < min(_LONGEST_RUN, len(one) - start, len(other) - there)
                and one[start + size] == other[there + size]
            ):
                size += 1
            if size >= QUOTE:
                yield one[start : start + size]
            at = other.find(one[place : place + _BLOCK], max(at + 1, there + size - _BLOCK))


def _num_alike(answer: _Text, other: _Text, own: Sequence[_Text]) -> int:
    """Return the number of letters in the short lines that two texts share, and that the texts of `own` do not have.

    Such lines may have been numbered, labelled or put into tags, so that no long run of letters is left.
    """
    lines = {
        line for line in answer.lines & other.lines if len(line) >= LINE and not any(text.has(line) for text in own)
    }
    # A line with a label is kept twice, with and without it.
    return sum(len(line) for line in lines if not any(line in longer for longer in lines - {line}))


def _role_and_texts(message: Message) -> tuple[bool, list[str]]:
    if not isinstance(message, dict):
        return False, []
    if message.get("role") == "assistant":
        return True, [text_of(message)]
    return False, [*_texts_in(message.get("content"))]


def _texts_in(content: object) -> Iterator[str]:
    """Yield the texts of a message's content, including those inside of parts, without the data of images and files."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            yield from _texts_in(part)
    elif isinstance(content, dict):
        for name in ("text", "content", "output"):
            yield from _texts_in(content.get(name))


def _readings(answer: str) -> Iterator[str]:
    """Yield an answer, the part after its reasoning, and the strings in it if it is JSON."""
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


def _strings_in(value: object) -> Iterator[str]:
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
