"""Token ids to the text that people read, piece by piece, and where stop strings cut it."""

from __future__ import annotations

from collections.abc import Sequence

from rllm.parser.decoding import TextDecoder


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
            self.text += text[len(shown) :]
            self._window = self._window[self._num_shown :]
            self._num_shown = len(self._window)
        return self.text


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the earliest stop string begins."""
    return min((place for place in map(text.find, stop) if place >= 0), default=None)
