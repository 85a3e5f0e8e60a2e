"""A sampled answer's ids to what the agent sees: text, reasoning, tool calls, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.parser.decoding import TextDecoder
from rllm.parser.reasoning import OPEN, split_reasoning
from rllm.parser.streaming import IncrementalText, first_stop, safe_length, visible_content, visible_reasoning
from rllm.parser.tool_parser import ParsedText, ToolFormat

_LAST_PROMPT_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer as the agent sees it."""

    text: str
    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    stop_string: str | None = None
    """The one that follows it, if one does."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Text of an answer that is streamed, in the order in which it is."""

    reasoning: str = ""
    content: str = ""

    def beyond(self, earlier: Shown) -> Shown:
        """Return the part of this answer that follows an earlier one, which is its prefix."""
        return Shown(self.reasoning[len(earlier.reasoning) :], self.content[len(earlier.content) :])


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
        """`plain`: the text is the content, whatever is in it: what continues a bare prompt has no other parts."""
        self._decoder = decoder
        self._stop = tuple(stop)
        self._is_plain = plain
        self._tool_parser = tool_parser
        self._markers = tool_parser.markers if tool_parser else ()
        self._opening_markers = tool_parser.opening_markers if tool_parser else ()
        prompt_end = decoder.text(prompt_ids[-_LAST_PROMPT_TOKENS:]).rstrip()
        self._starts_open = prompt_end.endswith(OPEN)
        self._so_far = IncrementalText(decoder)
        self._shown = Shown()

    def show(self, ids: Sequence[int]) -> Shown:
        """Take the next ids in; returns what can be shown in addition."""
        text = self._so_far.extend(ids)
        earlier, self._shown = self._shown, self._visible(text)
        return self._shown.beyond(earlier)

    def _visible(self, text: str) -> Shown:
        """Of an unfinished answer."""
        if self._is_plain:
            return Shown(content=text[: safe_length(text, self._stop)])
        reasoning = visible_reasoning(text, stop=self._stop, starts_open=self._starts_open)
        content = visible_content(
            text,
            stop=self._stop,
            markers=self._markers,
            opening_markers=self._opening_markers,
            starts_open=self._starts_open,
        )
        return Shown(reasoning, content)

    def rest(self, whole: Shown) -> Shown:
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
        split = split_reasoning(text, starts_open=self._starts_open)
        parsed = self._tool_parser.parse(split.answer) if self._tool_parser else ParsedText(content=split.answer)
        reasoning = split.reasoning or parsed.reasoning
        calls = parsed.tool_calls
        return Answer(text=text, content=parsed.content, reasoning=reasoning, tool_calls=calls, stop_string=stop)
