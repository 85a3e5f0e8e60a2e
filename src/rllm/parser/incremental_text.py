"""Token ids to the text that people read, piece by piece, and where stop strings cut it."""

from __future__ import annotations

from collections.abc import Sequence

from rllm.parser.decoding import TextDecoder

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
        """Give up on ids that never become a character, but for those that may be the beginning of one: a model that writes
        such ids without end would have all of them decoded with each."""
        for end in range(len(self._window) - _LONGEST_CHARACTER, self._num_shown, -1):
            begin = self._decoder.text(self._window[:end])
            if text.startswith(begin):  # else it cuts a character
                self._show(begin[start:], end)
                return


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the earliest stop string begins."""
    return min((place for place in map(text.find, stop) if place >= 0), default=None)
