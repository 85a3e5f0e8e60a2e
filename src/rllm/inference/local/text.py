"""Token ids to the text that people read: decoded piece by piece, cut at stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rllm.parser.reasoning import CLOSE, OPEN

_MARKUP = (OPEN, CLOSE, "<tool_call>", "</tool_call>")


class TextDecoder:
    """A tokenizer's way back, without its special tokens.

    Tokens that parsers look for stay, also where a tokenizer calls them special.
    """

    def __init__(self, tokenizer: Any, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        markup = {tokenizer.convert_tokens_to_ids(token) for token in _MARKUP}
        self._hidden = frozenset((*tokenizer.all_special_ids, *end_ids)) - markup

    def text(self, ids: Iterable[int]) -> str:
        visible = [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(visible, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


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
