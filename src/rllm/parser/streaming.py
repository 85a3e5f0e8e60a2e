"""Part of an unfinished answer that can be shown already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rllm.parser.decoding import TextDecoder
from rllm.parser.reasoning import CLOSE, OPEN, split_reasoning


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


def visible_content(
    text: str,
    *,
    stop: Sequence[str] = (),
    markers: Sequence[str] = (),
    opening_markers: Sequence[str] = (),
    starts_open: bool = False,
) -> str:
    """Return the part of an unfinished answer's content that no further text can change.

    `stop` strings end the whole text; `markers` begin a tool call, and so do `opening_markers` at the start of the
    content. Reasoning is not content.
    """
    text = text[: safe_length(text, stop)]
    body = text.lstrip()
    if starts_open or body.startswith(OPEN):
        if CLOSE not in text:
            return ""
    elif OPEN.startswith(body):  # it may still become reasoning
        return ""
    content = split_reasoning(text, starts_open=starts_open).answer
    start = content.lstrip()
    if any(start.startswith(marker) or marker.startswith(start) for marker in opening_markers):
        return ""
    return content[: safe_length(content, markers)]


def visible_reasoning(text: str, *, stop: Sequence[str] = (), starts_open: bool = False) -> str:
    """Return the part of an unfinished answer's reasoning that no further text can change."""
    text = text[: safe_length(text, stop)]
    body = text.lstrip()
    if OPEN.startswith(body):  # the tag itself may still follow
        return ""
    if not starts_open and not body.startswith(OPEN):
        return ""
    return split_reasoning(text[: safe_length(text, [CLOSE])], starts_open=starts_open).reasoning


_MOST_HELD = 16
_LONGEST_CHARACTER = 4
"""Bytes, and so ids at most."""


class IncrementalText:
    """The text of a growing list of ids; a character shows once its last byte is there."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        """The last ids that are shown, as context for the ids that are not shown yet."""
        self._num_shown = 0
        self.text = ""

    def extend(self, ids: Sequence[int]) -> str:
        """Take new ids in; returns the text so far."""
        self._window += ids
        shown = self._decoder.text(self._window[: self._num_shown])
        text = self._decoder.text(self._window)
        if len(text) > len(shown) and not text.endswith("\ufffd"):
            self._show(text[len(shown) :], len(self._window))
        elif len(self._window) - self._num_shown > _MOST_HELD:
            self._show_bytes_of_no_character(text, len(shown))
        return self.text

    def _show(self, text: str, end: int) -> None:
        """Add the text of the ids of the window up to `end`."""
        self.text += text
        self._window = self._window[self._num_shown :]
        self._num_shown = end - self._num_shown

    def _show_bytes_of_no_character(self, text: str, start: int) -> None:
        """Show ids that never become a character, except those that may begin one.

        Otherwise a model that writes such ids without end would have all of them decoded for each new one.
        """
        for end in range(len(self._window) - _LONGEST_CHARACTER, self._num_shown, -1):
            begin = self._decoder.text(self._window[:end])
            if text.startswith(begin):  # else it cuts a character
                self._show(begin[start:], end)
                return


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return the position of the earliest stop string."""
    return min((place for place in map(text.find, stop) if place >= 0), default=None)
