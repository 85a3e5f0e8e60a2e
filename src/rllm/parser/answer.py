"""A sampled answer's ids to what the agent sees: text, reasoning, tool calls, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rllm.parser.decoding import CLOSE, OPEN, TextDecoder, split_reasoning
from rllm.parser.tool_formats import ParsedText, ToolFormat
from rllm.types import JSONObject

_LAST_PROMPT_TOKENS = 16
_MOST_HELD = 16
_LONGEST_CHARACTER = 4
"""Bytes of the longest character, which may be as many ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer as the agent sees it."""

    text: str
    content: str
    reasoning: str
    tool_calls: list[JSONObject] = field(default_factory=list)
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class VisibleText:
    """Text of an answer that a streaming client can see."""

    reasoning: str = ""
    content: str = ""

    def beyond(self, earlier: VisibleText) -> VisibleText:
        """Return the part of this answer that follows an earlier one, which is its prefix."""
        return VisibleText(self.reasoning[len(earlier.reasoning) :], self.content[len(earlier.content) :])


class AnswerReader:
    """Reads one answer; streaming shows nothing that the whole answer does not contain."""

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        tool_parser: ToolFormat | None,
        plain: bool = False,
    ) -> None:
        """Create a reader; `plain` makes the whole text content, as in the continuation of a bare prompt."""
        self._decoder = decoder
        self._stop = tuple(stop)
        self._is_plain = plain
        self._tool_parser = tool_parser
        prompt_end = decoder.text(list(prompt_ids[-_LAST_PROMPT_TOKENS:])).rstrip()
        # The format's tags, unless the prompt ended in the usual one.
        of_format = tool_parser.reasoning_tags if tool_parser and not prompt_end.endswith(OPEN) else None
        self._tags = of_format or (OPEN, CLOSE)
        self._starts_open = prompt_end.endswith(self._tags[0].rstrip())
        self._so_far = IncrementalText(decoder)
        self._shown = VisibleText()

    def show(self, ids: Sequence[int]) -> VisibleText:
        """Add the next ids, and return the text that can be shown in addition."""
        text, earlier = self._so_far.extend(ids), self._shown
        if self._is_plain:
            self._shown = VisibleText(content=text[: safe_length(text, self._stop)])
        else:
            self._shown = visible(
                text, self._tool_parser, stop=self._stop, starts_open=self._starts_open, tags=self._tags
            )
        return self._shown.beyond(earlier)

    def rest(self, whole: VisibleText) -> VisibleText:
        """Return the part of the whole answer that was not shown yet."""
        return whole.beyond(self._shown)

    def read(self, ids: Sequence[int]) -> Answer:
        """Return the whole answer."""
        whole = self._decoder.text(ids)
        end = first_stop(whole, self._stop)
        text = whole[:end]
        stop = None if end is None else next(stop for stop in self._stop if whole.startswith(stop, end))
        if self._is_plain:
            return Answer(text=text, content=text, reasoning="", stop_string=stop)
        split = split_reasoning(text, starts_open=self._starts_open, tags=self._tags)
        parsed = self._tool_parser.parse(split.answer) if self._tool_parser else ParsedText(content=split.answer)
        reasoning = split.reasoning or parsed.reasoning
        calls = parsed.tool_calls
        return Answer(text=text, content=parsed.content, reasoning=reasoning, tool_calls=calls, stop_string=stop)


def safe_length(text: str, markers: Iterable[str]) -> int:
    r"""Return the length of the longest prefix of `text` without any part of a complete or unfinished marker.

    >>> safe_length("Wait.\nUser", ["\nUser:"])
    5
    """
    return min((_length_before(text, marker) for marker in markers), default=len(text))


def _length_before(text: str, marker: str) -> int:
    complete = text.find(marker)
    if complete >= 0:
        return complete
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)


def visible(
    text: str,
    tool_parser: ToolFormat | None = None,
    *,
    stop: Sequence[str] = (),
    starts_open: bool = False,
    tags: tuple[str, str] = (OPEN, CLOSE),
) -> VisibleText:
    """Return the part of an unfinished answer that no further text can change.

    A tool call is not content, and `stop` strings end the whole text. `starts_open`: the prompt ended in the first of
    the `tags` of reasoning.
    """
    text = text[: safe_length(text, stop)]
    body = text.lstrip()
    opening, closing = tags
    if opening.startswith(body):  # it may still become the tag
        return VisibleText()
    if starts_open or body.startswith(opening):
        before = text[: safe_length(text, [closing])]
        reasoning = split_reasoning(before, starts_open=starts_open, tags=tags).reasoning
        if closing not in text:
            return VisibleText(reasoning)
    else:
        reasoning = ""
    content = split_reasoning(text, starts_open=starts_open, tags=tags).answer
    start = content.lstrip()
    if tool_parser is None:
        return VisibleText(reasoning, content)
    if any(start.startswith(marker) or marker.startswith(start) for marker in tool_parser.opening_markers):
        return VisibleText(reasoning)
    return VisibleText(reasoning, content[: safe_length(content, tool_parser.markers)])


class IncrementalText:
    """The text of a growing list of ids; a character is shown once its last byte is there."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        """The last ids that are shown, as context for the ids that are not shown yet."""
        self._num_shown = 0
        self.text = ""

    def extend(self, ids: Sequence[int]) -> str:
        """Add new ids, and return the text so far."""
        self._window += ids
        shown = self._decoder.text(self._window[: self._num_shown])
        text = self._decoder.text(self._window)
        if len(text) > len(shown) and not text.endswith("\ufffd"):
            self._show(text[len(shown) :], len(self._window))
        elif len(self._window) - self._num_shown > _MOST_HELD:
            # Show ids that never become a character, except those that may begin one. Otherwise a model that writes
            # such ids without end would have all of them decoded for each new one.
            for end in range(len(self._window) - _LONGEST_CHARACTER, self._num_shown, -1):
                begin = self._decoder.text(self._window[:end])
                if text.startswith(begin):  # else it cuts a character
                    self._show(begin[len(shown) :], end)
                    break
        return self.text

    def _show(self, text: str, end: int) -> None:
        """Add the text of the ids of the window up to `end`."""
        self.text += text
        self._window = self._window[self._num_shown :]
        self._num_shown = end - self._num_shown


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return the position of the earliest stop string."""
    return min((place for place in map(text.find, stop) if place >= 0), default=None)
