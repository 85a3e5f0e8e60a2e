"""OpenAI's responses, their log probabilities: those of the tokens that spell what was said, and of no others.

A chat completion has one entry for each sampled token, those of its reasoning, its tool calls and its end among them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rllm.gateway.dialects.base import reasoning_of
from rllm.types import text_of


class TextLogprobs:
    """Shares out the entries of a stream among the pieces of its text; one that waits for its piece, like the first half of a
    character, is held back."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        """Of all the pieces so far."""
        self._held: list[Mapping[str, Any]] = []

    def hold(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Take the entries of a chunk, before the text of it."""
        self._held += entries

    def skip(self, text: str) -> None:
        """Let the entries go of something else that the chunk says; all that are held, where none spell it."""
        _, end = _where_spelled(text, self._held) or (0, len(self._held))
        del self._held[:end]

    def of(self, text: str) -> list[dict[str, Any]]:
        """The entries of the next piece; all that are held, where none spell it."""
        start, end = _where_spelled(text, self._held) or (0, len(self._held))
        entries = [_as_typed(entry) for entry in self._held[start:end]]
        del self._held[:end]
        self.given += entries
        return entries


def logprobs_of(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of a whole answer's text, which stands behind its reasoning; all there are, where none spell it."""
    message = choice.get("message") or {}
    text = text_of(message)
    if not text:
        return []
    entries = entries_of(choice)
    _, thought = _where_spelled(reasoning_of(message), entries) or (0, 0)
    start, end = _where_spelled(text, entries[thought:]) or (-thought, len(entries))
    return [_as_typed(entry) for entry in entries[thought + start : thought + end]]


def entries_of(choice: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The entries of a choice, whole or of a chunk."""
    return (choice.get("logprobs") or {}).get("content") or ()


def _where_spelled(text: str, entries: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """From where to where the entries stand whose tokens first spell a text, also if they spell a little around it."""
    tokens = [bytes_of(entry) for entry in entries]
    start = b"".join(tokens).find(text.encode())
    if start < 0 or not text:
        return None
    ends = list(accumulate(len(token) for token in tokens))
    return bisect_right(ends, start), bisect_left(ends, start + len(text.encode())) + 1


def bytes_of(entry: Mapping[str, Any]) -> bytes:
    """Return the bytes of an entry's token, or of its text where nothing better is known."""
    known = entry.get("bytes")
    return bytes(known) if known is not None else str(entry.get("token") or "").encode()


def _as_typed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion's entry; here the bytes of a token are always a list, and those that nobody knows are none."""
    others = [{**other, "bytes": other.get("bytes") or []} for other in entry.get("top_logprobs") or ()]
    return {**entry, "bytes": entry.get("bytes") or [], "top_logprobs": others}
